"""A generation in progress, and the typed messages that enter and leave the engine. Imports no jax."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from jaxllm.sampling.constraint import Constraint
from jaxllm.sampling.options import SamplingParams

if TYPE_CHECKING:
    from jaxllm.engine.detok import Detokenizer
    from jaxllm.engine.guide import Guide

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
        raise RequestError(f"cache_salt must have 1 to {MAX_SALT} characters, got {len(salt)}", "cache_salt")
    if any(c in "@/\\" or not c.isprintable() for c in salt):
        raise RequestError("cache_salt must hold printable characters other than @, / and \\", "cache_salt")


def check_logprobs(name: str, value: int | None, most: int) -> None:
    """Raises RequestError when the option `name` asks for more of the most likely tokens than the engine gives."""
    if value is not None and value > most:
        raise RequestError(f"{name} ({value}) must be at most {most} (--max-logprobs)", name)


def check_scores(prompts: Sequence[int], top: int, choices: int) -> None:
    """Raises RequestError when prompts of these lengths have more log-probabilities, told with each of so many choices, than memory shall
    be spent on."""
    entries = sum(prompts) * (top + 1) * choices
    if entries > MAX_SCORES:
        message = (
            f"prompt_logprobs ({top}) for prompts of {sum(prompts)} tokens and {choices} choices are {entries} log-probabilities; "
            f"at most {MAX_SCORES} are given"
        )
        raise RequestError(f"{message}; ask for fewer, or send shorter prompts", "prompt_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What the front ends ask of the engine. `id` is made by the server or library, never by a client. Only requests with an equal
    `cache_salt` share cached prefixes."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float = field(default_factory=time.time)
    grammar: str | None = None  # what `params.structured_outputs` was compiled to (grammar.checker), which is then None
    cache_salt: str | None = None


@dataclass(slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token, its rank (1 = most likely) and the top entries."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of all tokens of a prompt but the first, with `top` of the most likely ones at each position: int32 rows in the
    form of `sampling.logprobs`. `engine.logprobs.of_prompt` reads them."""

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


class TextDelta(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):  # there is one a token: a dataclass takes four times as long
    """New tokens and text of choice `index` of request `id`. `finish_reason` is set on the last one:
    "stop" | "length" | "abort" | "error"; `stop_reason` is the stop string or stop token id that ended it. `logprobs` are packed, a row for
    each of its tokens (`engine.logprobs.unpacked` reads them); `prompt_logprobs` come with the first one of each choice, if they were
    asked for."""

    id: str
    index: int
    token_ids: list[int]
    text: str
    logprobs: bytes | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    cumulative_logprob: float | None = None  # of all tokens of the choice, where choices compete by it
    times: RequestTimes | None = None
    error: str | None = None
    fault: str | None = None  # the field of the request that made `error`, if one did


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


class Status(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


type HostFunction = Callable[[list[int], np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What a choice asks of `process` beside its params: the packed bits of the tokens that it may ever say, what decides token by token
    (also a grammar, where it is `guided`), and functions of its output and a row of logits `[V]` that give the logits to draw from."""

    allowed_W: np.ndarray
    constraints: Sequence[Constraint] = ()
    functions: Sequence[HostFunction] = ()
    guided: bool = False

    @property
    def restricted(self) -> bool:
        """Whether what may be said next depends on what was said."""
        return self.guided or bool(self.constraints)

    @property
    def on_host(self) -> bool:
        """Whether a draw needs every token before it to be on the host."""
        return self.guided or bool(self.constraints or self.functions)


@dataclass(slots=True, eq=False)
class Family:
    """The choices of one prompt, which may start from each other's pages. Those of a beam search, with `seats` above 0, hold so many slots
    together, of which `spare` are the ones that none of them is in. `found` tokens were cached before any of them ran."""

    members: list[Request]
    seats: int = 0
    seated: int = 0
    spare: list[int] = field(default_factory=list)
    found: int | None = None


@dataclass(slots=True, eq=False)
class Table:
    """A request's pages in the pool of one kind of layers, in the order of the sequence. Those before `behind` were given back, or never
    taken, since no token still to be computed sees them: there may stand any page's number, whoever has it now."""

    pages: list[int] = field(default_factory=list)
    behind: int = 0
    found: int = 0  # how many of them were there at admission

    @property
    def held(self) -> list[int]:
        """The pages that the request holds."""
        return self.pages[self.behind :] if self.behind else self.pages


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one request: the only mutable record that travels, touched only by the engine's thread.

    `computed` counts tokens whose KV exists or is being written by a step in flight. The sequence is prompt + output;
    under overlap the last output token may still be on the device, so `num_scheduled_outputs` (tokens sampled or in
    flight) can be one ahead of `len(output)`.
    """

    id: str
    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    arrival: float
    max_tokens: int  # already clamped to the model's length
    cache_salt: str | None = None
    adapter: bytes | None = None  # identity of an adapter that changes the KV; nothing sets one yet
    needs: int = 0  # of programs after a forward (sampling.choose)
    asked: Asked | None = None  # None: no option of `params` is one that `process` serves
    place: tuple[float, ...] = ()  # in the scheduler's order, from arrival on
    guide: Guide | None = None  # follows the request's grammar
    stops: frozenset[int] = frozenset()  # tokens that end it
    detok: Detokenizer | None = None  # makes its text
    score_end: int = 0  # prompt positions before it are scored: their next tokens' log-probabilities are wanted
    scored: int = 0  # of these, how many have been scored or are in a step in flight
    top: int = 0  # how many of the most likely tokens the host wants to know
    status: Status = Status.WAITING
    slot: int = -1
    tables: tuple[Table, ...] = ()  # of each kind of layers, while it runs
    hashes: list[bytes] = field(default_factory=list)  # chained hash of each full page registered or looked up
    arriving: int = 0  # pages that are still on their way from host memory
    stored: list[bytes] = field(default_factory=list)  # what host memory keeps for it while it is swapped out
    computed: int = 0
    prefill_end: int = 0  # tokens to compute in chunks before decoding starts, fixed at admission
    kept: int = 0  # tokens whose KV was there at admission: computed again or not, they are not written again
    room: int = 0  # tokens that may be written before the scheduler must see to a page
    family: Family | None = None
    searches: bool = False  # one of the beams of a search, which are told their tokens one by one
    output: list[int] = field(default_factory=list)
    jumped: bool = False  # tokens were appended without a draw: that of the step in flight is not used
    stuck: str | None = None  # why it cannot go on: the step in flight says nothing for it
    num_scheduled_outputs: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    @property
    def pages(self) -> list[int]:
        """Its pages where all layers are of one kind, and of several kinds the first one's."""
        return self.tables[0].pages if self.tables else []

    @property
    def times(self) -> RequestTimes:
        """When what happened."""
        return RequestTimes(
            arrival=self.arrival,
            scheduled=self.scheduled_at,
            first_token=self.first_token_at,
            last_token=self.last_token_at,
            num_preemptions=self.num_preemptions,
        )

    @property
    def num_tokens(self) -> int:
        """Length of prompt plus outputs known on the host."""
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids [start, stop) of prompt + output."""
        n = len(self.prompt)
        if stop <= n:
            return self.prompt[start:stop]
        return self.prompt[start:n] + self.output[max(0, start - n) : stop - n]
