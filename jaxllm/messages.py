"""What front ends and the engine say to each other. Imports no jax."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from jaxllm.sampling.options import SamplingParams

MAX_SCORES = 2**20  # log-probabilities of the prompts of one request


class RequestError(ValueError):
    """This request cannot run. `param` names the field at fault, `code` is a machine-readable cause
    ("context_length_exceeded", "invalid_token_id", "queue_full", …)."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


MAX_SALT = 128  # characters


def check_salt(salt: object) -> None:
    """Raise RequestError unless `salt` may be a request's cache_salt."""
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


def check_logprobs(name: str, value: int | None, most: int) -> None:
    """Raises RequestError when the option `name` asks for more of the most likely tokens than the
    engine gives."""
    if value is not None and value > most:
        raise RequestError(f"{name} ({value}) must be at most {most} (--max-logprobs)", name)


def check_prompt_logprobs(prompts: Sequence[int], top: int, choices: int) -> None:
    """Raises RequestError when prompts of these lengths have more log-probabilities, told with each
    of so many choices, than memory shall be spent on."""
    entries = sum(prompts) * (top + 1) * choices
    if entries > MAX_SCORES:
        message = (
            f"prompt_logprobs ({top}) for prompts of {sum(prompts)} tokens and {choices} choices are {entries} log-probabilities; "
            f"at most {MAX_SCORES} are given"
        )
        raise RequestError(f"{message}; ask for fewer, or send shorter prompts", "prompt_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What the front ends ask of the engine. `id` is made by the server or library, never by a
    client. Only requests with an equal `cache_salt` share cached prefixes."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float = field(default_factory=time.time)
    # What `params.structured_outputs` was compiled to (grammar.checker), which is then None
    grammar: str | None = None
    cache_salt: str | None = None


@dataclass(slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token, its rank (1 = most likely) and the top
    entries."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of all tokens of a prompt but the first, with `top` of the most likely ones
    at each position: int32 rows in the form of `sampling.logprobs`. `engine.logprobs.of_prompt`
    reads them."""

    top: int
    packed: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Wall-clock seconds (time.time) of one request's life, sent with its last delta."""

    arrival: float
    scheduled: float
    first_token: float
    last_token: float
    num_preemptions: int = 0


# There is one a token: a dataclass takes four times as long
class TextDelta(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """New tokens and text of choice `index` of request `id`. `finish_reason` is set on the last
    one: "stop" | "length" | "abort" | "error"; `stop_reason` is the stop string or stop token id
    that ended it. `logprobs` are packed, a row for each of its tokens (`engine.logprobs.unpacked`
    reads them); `prompt_logprobs` come with the first one of each choice, if they were asked
    for."""

    id: str
    index: int
    token_ids: list[int]
    text: str
    logprobs: bytes | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    # Of all tokens of the choice, where choices compete by it
    cumulative_logprob: float | None = None
    times: RequestTimes | None = None
    error: str | None = None
    error_param: str | None = None  # the field of the request that made `error`, if one did


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot after a step; counters count since start."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    compiles_after_warmup: int = 0
    free_pages: int = 0
    num_pages: int = 0
    host_usage: float = 0.0  # share of the host's pages that hold something
    pages_saved: int = 0  # copied to host memory
    pages_loaded: int = 0  # and back
    self_checks: int = 0
    self_check_failures: int = 0
    self_check_problem: str = ""  # what the last one found
