"""A generation in progress, and the typed messages that enter and leave the engine. Imports no jax."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxllm.messages import RequestTimes
from jaxllm.sampling.constraint import Constraint
from jaxllm.sampling.options import SamplingParams


class Status(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


type HostFunction = Callable[[list[int], np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class LogitsOptions:
    """What a choice asks of `process` beside its params: the packed bits of the tokens that it may
    ever say, what decides token by token (also a grammar, where it is `guided`), and functions of
    its output and a row of logits `[V]` that give the logits to draw from."""

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
class PromptSharing:
    """The choices of one prompt, which may start from each other's pages. Those of a beam search,
    with `seats` above 0, hold so many slots together, of which `spare` are the ones that none of
    them is in. `found` tokens were cached before any of them ran."""

    members: list[Request]
    seats: int = 0
    seated: int = 0
    spare: list[int] = field(default_factory=list)
    found: int | None = None


@dataclass(slots=True, eq=False)
class Table:
    """A request's pages in the pool of one kind of layers, in the order of the sequence. Those
    before `behind` were given back, or never taken, since no token still to be computed sees them:
    there may stand any page's number, whoever has it now."""

    pages: list[int] = field(default_factory=list)
    behind: int = 0
    found: int = 0  # how many of them were there at admission

    @property
    def held(self) -> list[int]:
        """The pages that the request holds."""
        return self.pages[self.behind :] if self.behind else self.pages


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one request: the only mutable record that travels, touched only by the engine's
    thread.

    `computed` counts tokens whose KV exists or is being written by a step in flight. The sequence
    is prompt + output; under overlap the last output token may still be on the device, so
    `num_scheduled_outputs` (tokens sampled or in flight) can be one ahead of `len(output)`.
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
    asked: LogitsOptions | None = None  # None: no option of `params` is one that `process` serves
    place: tuple[float, ...] = ()  # in the scheduler's order, from arrival on
    stops: frozenset[int] = frozenset()  # tokens that end it
    # Prompt positions before it are scored: their next tokens' log-probabilities are wanted
    score_end: int = 0
    scored: int = 0  # of these, how many have been scored or are in a step in flight
    top: int = 0  # how many of the most likely tokens the host wants to know
    status: Status = Status.WAITING
    slot: int = -1
    tables: tuple[Table, ...] = ()  # of each kind of layers, while it runs
    # Chained hash of each full page registered or looked up
    hashes: list[bytes] = field(default_factory=list)
    arriving: int = 0  # pages that are still on their way from host memory
    # What host memory keeps for it while it is swapped out
    stored: list[bytes] = field(default_factory=list)
    computed: int = 0
    prefill_end: int = 0  # tokens to compute in chunks before decoding starts, fixed at admission
    # Tokens whose KV was there at admission: computed again or not, they are not written again
    kept: int = 0
    room: int = 0  # tokens that may be written before the scheduler must see to a page
    family: PromptSharing | None = None
    searches: bool = False  # one of the beams of a search, which are told their tokens one by one
    output: list[int] = field(default_factory=list)
    # Tokens were appended without a draw: that of the step in flight is not used
    jumped: bool = False
    dead_end: str | None = None  # why it cannot go on: the step in flight says nothing for it
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
