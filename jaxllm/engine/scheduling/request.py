"""The scheduler's record of one choice of one request. Imports no jax."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxllm.messages import RequestTimes
from jaxllm.prompt import Prompt
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
    """Options of a choice that the `process` program serves beside its params.

    Attributes:
        allowed_W: Packed bits of the tokens that it may ever generate.
        constraints: Rules that decide token by token.
        functions: Functions of its output and a row of logits `[V]`; each returns the logits to
            draw from.
        has_grammar: Whether a grammar decides too.
    """

    allowed_W: np.ndarray
    constraints: Sequence[Constraint] = ()
    functions: Sequence[HostFunction] = ()
    has_grammar: bool = False

    @property
    def restricted(self) -> bool:
        """Whether the allowed tokens depend on earlier ones."""
        return self.has_grammar or bool(self.constraints)

    @property
    def on_host(self) -> bool:
        """Whether a draw needs every earlier token on the host."""
        return self.has_grammar or bool(self.constraints or self.functions)


@dataclass(slots=True, eq=False)
class PromptSharing:
    """The choices of one prompt, which may start from each other's pages.

    Attributes:
        members: The choices; of a beam search the requests that compute its beams now.
        slots: Slots that a beam search holds as one, from its first beam's admission to its last
            beam's end; 0 for choices that are no beams.
        active: Slots of these that a beam is in.
        spare: Slots of these that no beam is in.
        cached_tokens: Prompt tokens that were cached before any member ran; None until then.
    """

    members: list[Request]
    slots: int = 0
    active: int = 0
    spare: list[int] = field(default_factory=list)
    cached_tokens: int | None = None


@dataclass(slots=True, eq=False)
class PageTable:
    """A request's pages in the pool of one cache group, in the order of the sequence.

    Attributes:
        pages: Page numbers. Those before `out_of_window` are not held and may be any number.
        out_of_window: Leading pages that were given back, or never taken, because no token still
            to be computed sees them.
        found: Leading pages that existed at admission.
    """

    pages: list[int] = field(default_factory=list)
    out_of_window: int = 0
    found: int = 0

    @property
    def resident(self) -> list[int]:
        """The pages that the request holds."""
        if self.out_of_window:
            return self.pages[self.out_of_window :]
        return self.pages


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one request; only the engine's thread touches it.

    The sequence is prompt + output. Under overlap the last output tokens may still be on the
    device, so `num_scheduled_outputs` can be ahead of `len(output)`, by one for each step in
    flight.

    Attributes:
        id, index: The request's id, and which of its choices this is.
        max_tokens: Most tokens to generate, clamped to the model's length.
        cache_salt: Prefixes are shared within one salt only.
        adapter: Identity of an adapter that changes the KV; nothing sets one yet.
        needs: Programs wanted after a forward (bits of sampling.choose).
        logits_options: Options that the `process` program serves; None when there are none.
        stops: Token ids that end it.
        top: How many of the most likely tokens the host wants to know.
        score_end: Prompt positions before it get log-probabilities.
        scored: Positions of these that are scored, or in a step in flight.
        order: Its place in the scheduler's total order, from arrival on.
        shares_pages: Other engines may fetch the pages of its prompt.
        second_text: First token of a pair's second text; 0 where the prompt is one text.
        sharing: The choices of its prompt, when there are several.
        is_beam: Whether it computes a beam, whose tokens the search chooses.
        slot: Its row on the device while it runs; -1 otherwise.
        tables: Its pages in each cache group while it runs.
        hashes: Chained hash of each full page that was registered or looked up.
        pages_in_transit: Pages that are still on their way from host memory.
        pinned: Hashes that host memory keeps for it while it is swapped out, or since they came
            from another engine.
        has_run: Some of its tokens were in a step.
        computed: Tokens whose KV exists or is being written by a step in flight. Drafts of steps in
            flight count as if all were accepted.
        drafts: Drafts of steps in flight, of which nobody knows yet which are accepted.
        prefill_end: Tokens to compute in chunks before it decodes, fixed at admission.
        kept: Tokens whose KV existed at admission; they are never written again.
        capacity: Tokens that may be written before the scheduler must allocate a page.
        output: Tokens generated so far, as far as the host knows them.
        num_scheduled_outputs: Tokens drawn, and one for each step in flight, which gives that many
            at least.
        num_cached_tokens: Prompt tokens that were cached before it, or another choice, first ran.
        prefix_miss: Why the tokens after the first `num_cached_tokens` were not found.
        scheduled_at, first_token_at, last_token_at: Unix times in seconds; 0 before.
    """

    id: str
    index: int
    prompt: Prompt
    params: SamplingParams
    seed: int
    arrival: float
    max_tokens: int
    cache_salt: str | None = None
    adapter: bytes | None = None
    needs: int = 0
    logits_options: LogitsOptions | None = None
    stops: frozenset[int] = frozenset()
    top: int = 0
    score_end: int = 0
    scored: int = 0
    status: Status = Status.WAITING
    order: tuple[float, ...] = ()
    shares_pages: bool = False
    second_text: int = 0
    sharing: PromptSharing | None = None
    is_beam: bool = False
    slot: int = -1
    tables: tuple[PageTable, ...] = ()
    hashes: list[bytes] = field(default_factory=list)
    pages_in_transit: int = 0
    pinned: list[bytes] = field(default_factory=list)
    has_run: bool = False
    computed: int = 0
    drafts: int = 0
    prefill_end: int = 0
    kept: int = 0
    capacity: int = 0
    output: list[int] = field(default_factory=list)
    num_scheduled_outputs: int = 0
    num_cached_tokens: int = 0
    prefix_miss: str | None = None
    num_preemptions: int = 0
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    @property
    def pages(self) -> list[int]:
        """Its pages in the first cache group."""
        if self.tables:
            return self.tables[0].pages
        return []

    @property
    def times(self) -> RequestTimes:
        """Its times and preemptions, as the client's statistics want them."""
        return RequestTimes(
            arrival=self.arrival,
            scheduled=self.scheduled_at,
            first_token=self.first_token_at,
            last_token=self.last_token_at,
            num_preemptions=self.num_preemptions,
        )

    @property
    def siblings(self) -> Sequence[Request]:
        """The choices of its prompt, itself included."""
        if self.sharing is None:
            return (self,)
        return self.sharing.members

    @property
    def verified(self) -> int:
        """Tokens whose KV exists or is being written, whichever drafts of steps in flight are
        accepted. Those from here on may still be written, or be written again."""
        return self.computed - self.drafts

    @property
    def kv_end(self) -> int:
        """Tokens whose KV it has when it ends at `max_tokens`: all but the last one."""
        return len(self.prompt.tokens) + self.max_tokens - 1

    @property
    def num_tokens(self) -> int:
        """Length of the prompt plus the outputs known on the host."""
        return len(self.prompt.tokens) + len(self.output)

    @property
    def tokens_known(self) -> bool:
        """Whether the host knows every token drawn for it: none is in flight or undecided."""
        return self.num_scheduled_outputs == len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids [start, stop) of prompt + output."""
        return self._span(self.prompt.tokens, start, stop)

    def keys(self, start: int, stop: int) -> list[int]:
        """What is hashed of these tokens: the prompt's keys, and tokens of the output."""
        return self._span(self.prompt.keys, start, stop)

    def _span(self, prompt: list[int], start: int, stop: int) -> list[int]:
        """Numbers [start, stop) of those of a prompt, which the output follows."""
        n = len(prompt)
        if stop <= n:  # without a copy more
            return prompt[start:stop]
        return prompt[start:n] + self.output[max(0, start - n) : stop - n]

    def forked(self, arrival: int) -> Request:
        """A request in this one's state, with the same pages, next after it in the order."""
        child = replace(self, order=(*self.order[:2], arrival))
        child.tables = tuple(replace(table, pages=list(table.pages)) for table in self.tables)
        child.output, child.hashes = list(self.output), list(self.hashes)
        if self.status is Status.RUNNING:
            child.capacity = self.capacity = self.verified
        return child
