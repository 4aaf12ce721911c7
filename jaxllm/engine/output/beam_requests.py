"""Running beam searches: which request computes which beam, and the sequences they return. Imports
no jax."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from jaxllm.config import Resolved
from jaxllm.engine.output.beam_search import BeamSearch, Finished, Rules
from jaxllm.engine.output.counters import Counters
from jaxllm.engine.output.detok import Detokenizer
from jaxllm.engine.scheduling.request import PromptSharing, Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.logprobs import packed_from
from jaxllm.messages import TextDelta


class BeamRequests:
    """The requests of one search; each computes one beam.

    The first computes the prompt. In every step each beam's request computes the beam's last token
    and gives its most likely next tokens. Once all beams have given theirs, the search selects the
    next beams: a request that several of them continue is forked, one that none continues is
    finished.

    Attributes:
        search: the arithmetic of the search.
        root: the request that was added to the scheduler.
    """

    def __init__(self, rules: Rules, root: Request, scheduler: Scheduler):
        self.search = BeamSearch(rules)
        self.root = root
        self._scheduler = scheduler
        self._family = PromptSharing([root], slots=rules.width)
        self._tops: dict[Request, list[tuple[int, float]]] = {}
        root.sharing = self._family
        root.max_tokens = 1
        root.top = max(root.top, self.search.needed)
        root.is_beam = True

    @property
    def members(self) -> list[Request]:
        """The requests that compute its beams now, best beam first."""
        return self._family.members

    def add_top_tokens(self, request: Request, top: list[tuple[int, float]]) -> bool:
        """Take the next tokens of one beam, (id, log-probability), most likely first. Returns True
        when the search is over."""
        members = self._family.members
        self._tops[request] = top
        if len(self._tops) < len(members):
            return False
        parents = self.search.step([self._tops[member] for member in members])
        self._tops.clear()
        self._continue(parents)
        return not parents

    def finish_all(self) -> None:
        """Free the slots and pages of all beams."""
        for member in self._family.members:
            self._scheduler.finish(member)

    def _continue(self, parents: list[int]) -> None:
        """Give each new beam a request. Beams that nothing continues are finished first, so that
        forks can use their slots and pages."""
        old = self._family.members
        for index, member in enumerate(old):
            if index not in parents:
                self._scheduler.finish(member)
        members: list[Request] = []
        for place, parent in enumerate(parents):
            members.append(
                self._scheduler.fork(old[parent]) if parent in parents[:place] else old[parent]
            )
        self._family.members = members
        for member, beam in zip(members, self.search.beams, strict=True) if parents else ():
            member.output.append(beam.tokens[-1])
            member.max_tokens += 1
            if member.status is Status.RUNNING:
                member.prefill_end = member.num_tokens


class BeamSearchManager:
    """All beam searches of an engine.

    `make_detokenizer` returns None for requests without text. Sequences that end with one of
    the model's end-of-sequence tokens have no stop reason. Tokens of returned sequences are counted
    in `counters`.

    Attributes:
        open: The searches that have not ended, by request id.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        make_detokenizer: Callable[[Request], Detokenizer | None],
        resolved: Resolved,
        counters: Counters,
    ):
        self._scheduler = scheduler
        self._make_detokenizer = make_detokenizer
        self._resolved = resolved
        self._counters = counters
        self.open: dict[str, BeamRequests] = {}

    def start_search(self, root: Request, stops: frozenset[int]) -> bool:
        """Start a search with a request that was just added to the scheduler; False where it wants
        none. `stops` end a sequence."""
        params = root.params
        if not params.use_beam_search:
            return False
        rules = Rules(
            width=params.samples,
            max_tokens=root.max_tokens,
            min_tokens=params.min_tokens,
            stops=stops,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        self.open[root.id] = BeamRequests(rules, root, self._scheduler)
        return True

    def add_top_tokens(
        self, request: Request, top: list[tuple[int, float]], now: float
    ) -> list[TextDelta]:
        """Take the next tokens of one beam. At the end of its search, returns one delta for each
        choice."""
        beams = self.open[request.id]
        root = beams.root
        root.first_token_at = root.first_token_at or now
        root.last_token_at = now
        if not beams.add_top_tokens(request, top):
            return []
        del self.open[request.id]
        found = beams.search.finished[: root.params.n]
        self._counters.generation_tokens += sum(len(one.beam.tokens) for one in found)
        return [self._delta(root, index, one) for index, one in enumerate(found)]

    def stop_search(
        self, request_id: str, reason: str, error: str | None = None
    ) -> list[TextDelta]:
        """End a search early. Returns the last deltas of its choices, [] for an unknown id."""
        beams = self.open.pop(request_id, None)
        if beams is None:
            return []
        beams.finish_all()
        last = _last(beams.root, 0, reason)
        return [replace(last, index=index, error=error) for index in range(beams.root.params.n)]

    def undelivered(self) -> list[tuple[str, int]]:
        """(request id, choice index) of every choice whose end the client has not got."""
        return [
            (beams.root.id, index)
            for beams in self.open.values()
            for index in range(beams.root.params.n)
        ]

    def _delta(self, root: Request, index: int, one: Finished) -> TextDelta:
        """A finished sequence as the only delta of a choice."""
        params = root.params
        beam = one.beam
        text = ""
        detok = self._make_detokenizer(root)
        if detok is not None:
            hidden = one.stop is not None and not params.include_stop_str_in_output
            text = detok.feed(beam.tokens[:-1] if hidden else beam.tokens).text + detok.finish()
        is_eos = one.stop in self._resolved.eos_ids
        named = one.stop is not None and (params.ignore_eos or not is_eos)
        count = params.logprobs
        return replace(
            _last(root, index, "length" if one.stop is None else "stop"),
            token_ids=beam.tokens,
            text=text,
            logprobs=None if count is None else packed_from(beam.entries, count),
            stop_reason=one.stop if named else None,
            cumulative_logprob=beam.logprob,
        )


def _last(root: Request, index: int, reason: str) -> TextDelta:
    """The last delta of a choice, without tokens."""
    return TextDelta(
        id=root.id,
        index=index,
        token_ids=[],
        text="",
        finish_reason=reason,
        num_cached_tokens=root.num_cached_tokens,
        times=root.times,
    )
