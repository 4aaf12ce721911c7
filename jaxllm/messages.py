"""Messages between front ends and the engine. Imports no jax."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams

MAX_SCORES = 2**20  # log-probabilities of the prompts of one request
MAX_SALT = 128  # characters
# Of tokens that a step computes: upper bounds of the counts of steps in `EngineStats.step_tokens`
STEP_TOKENS = (1, *(2**power for power in range(3, 15)))
# Why the rest of a prompt was not in the prefix cache: nobody has sent it; its pages were evicted;
# the same text was there under another salt, or adapter
PREFIX_MISSES = ("new_text", "evicted", "salt", "adapter")


class RequestError(ValueError):
    """A request cannot run.

    Attributes:
        param: the field at fault.
        code: the cause for programs: "context_length_exceeded", "invalid_token_id", "queue_full" …
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


def check_salt(salt: object) -> None:
    """Raises RequestError unless `salt` may be a request's cache_salt."""
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a string, got {type(salt).__name__}", "cache_salt")
    if not 1 <= len(salt) <= MAX_SALT:
        raise RequestError(
            f"cache_salt must have 1 to {MAX_SALT} characters, got {len(salt)}", "cache_salt"
        )
    if any(c in "@/\\" or not c.isprintable() for c in salt):
        raise RequestError(
            "cache_salt must hold printable characters other than @, / and \\", "cache_salt"
        )


def check_prompt_logprobs(prompts: Sequence[int], top: int, choices: int) -> None:
    """Raises RequestError when the prompts of a request, of these lengths, have more than
    MAX_SCORES log-probabilities over all choices."""
    entries = sum(prompts) * (top + 1) * choices
    if entries > MAX_SCORES:
        raise RequestError(
            f"prompt_logprobs ({top}) for prompts of {sum(prompts)} tokens and {choices} choices "
            f"are {entries} log-probabilities; at most {MAX_SCORES} are given; "
            "ask for fewer, or send shorter prompts",
            "prompt_logprobs",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """How long an output may think.

    Attributes:
        tokens: of reasoning, after which the first of `ends` must come.
        begun: whether the prompt has begun the reasoning; else an output may begin it.
        starts: texts of the markers that begin it.
        ends: texts of the markers that end it.
    """

    tokens: int
    begun: bool
    starts: tuple[str, ...]
    ends: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request to the engine.

    Attributes:
        id: made by the server or library, never by a client.
        params: the sampling that runs once the engine has validated it (`prepared.prepared`).
        arrival: seconds since the epoch.
        grammar: the compiled `params.structured_outputs` (grammar.checker).
        cache_salt: only requests with an equal one share cached prefixes.
        shares_pages: whether other engines may fetch the pages of the prompt.
        page_offer: where such pages are, as the engine that has them signed it (kv_transfer.offer).
    """

    id: str
    prompt: Prompt
    params: SamplingParams
    arrival: float = field(default_factory=time.time)
    grammar: str | None = None
    cache_salt: str | None = None
    thinking: ThinkingBudget | None = None
    shares_pages: bool = False
    page_offer: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest:
    """A request to the engine of a pooling model.

    Attributes:
        id: made by the server or library, never by a client.
        params: what the scheduler reads of it, which is its priority: nothing is drawn.
        arrival: seconds since the epoch.
        cache_salt: only requests with an equal one share cached prefixes.
        second_text: first token of a pair's second text; 0 where the prompt is one text.
    """

    id: str
    prompt: Prompt
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=1))
    arrival: float = field(default_factory=time.time)
    cache_salt: str | None = None
    second_text: int = 0


@dataclass(slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
        token_id: the chosen token.
        rank: of the chosen token, 1 for the most likely.
        top: (id, log-probability) of the most likely tokens.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of all tokens of a prompt but the first.

    Attributes:
        top: how many of the most likely tokens each position has.
        packed: int32 rows of `sampling.logprobs`; `logprobs.prompt_entries` reads them.
    """

    top: int
    packed: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Times of one request, seconds since the epoch, sent with its last delta."""

    arrival: float
    scheduled: float
    first_token: float
    last_token: float
    num_preemptions: int = 0


# Made for every token; a dataclass takes four times as long
class TextDelta(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """New tokens and text of choice `index` of request `id`.

    Attributes:
        logprobs: packed, a row per token (`logprobs.unpacked` reads them).
        prompt_logprobs: with the first delta of each choice after they are computed.
        finish_reason: of the last delta: "stop", "length", "abort" or "error".
        stop_reason: the stop string or stop token id that ended the choice.
        prefix_miss: with the last delta of the choice for which the prompt was looked up: why the
            rest of it was not found, one of PREFIX_MISSES.
        cumulative_logprob: of all tokens of the choice, where choices are ranked.
        pooled: the result of a pooling request: float32, as the model gives it.
        error: the reason of "error".
        error_param: the field of the request that caused it, if one did.
    """

    id: str
    index: int
    token_ids: list[int]
    text: str
    logprobs: bytes | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    prefix_miss: str | None = None
    cumulative_logprob: float | None = None
    times: RequestTimes | None = None
    pooled: bytes | None = None
    error: str | None = None
    error_param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot after a step; counters count since start.

    Attributes:
        deferred: of those that wait, which wait for a grammar; who waits for pages holds a slot.
        kv_usage: share of KV pages in use.
        prefix_queries: prompt tokens looked up in the prefix cache.
        prefix_hits: prompt tokens found there.
        computed_tokens: of all steps.
        step_tokens: steps by the tokens that they computed: up to each of STEP_TOKENS, and more.
        host_usage: share of the pages of host memory in use.
        pages_saved: copied to host memory.
        pages_loaded: copied back.
        self_check_problem: found by the last self-check, "" for none.
        late_programs: made since the engine is ready, as planned.
        missing_programs: of those, yet to be made.
        sleep_level: 0 while the engine is awake.
    """

    running: int = 0
    waiting: int = 0
    deferred: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    computed_tokens: int = 0
    step_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKENS) + 1)
    compiles_after_warmup: int = 0
    late_programs: int = 0
    missing_programs: int = 0
    free_pages: int = 0
    num_pages: int = 0
    host_usage: float = 0.0
    pages_saved: int = 0
    pages_loaded: int = 0
    self_checks: int = 0
    self_check_failures: int = 0
    self_check_problem: str = ""
    sleep_level: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """The KV pages of one cache group as a map.

    Attributes:
        window: tokens that a token of these layers sees; None: all.
        held: pages that requests hold.
        cached: free pages that still hold a prefix.
        per_cell: consecutive pages in a cell; the last cell may have fewer.
        cells: three hexadecimal digits a cell: its share of held pages and of cached pages (both
            rounded up, f: all), and the most references to one page (f: 15 or more).
    """

    pages: int
    page_size: int
    window: int | None
    held: int
    cached: int
    per_cell: int
    cells: str


@dataclass(slots=True)
class StepTotals:
    """Steps of one kind since start, the seconds they took and the tokens they computed."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """What somebody who watches the engine sees besides `EngineStats`; made when asked for.

    Attributes:
        step_totals: of "decode", "prefill" and "mixed" steps.
    """

    pools: list[PoolView]
    step_totals: dict[str, StepTotals]
