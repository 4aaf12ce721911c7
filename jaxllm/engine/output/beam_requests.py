"""Beam searches that are running: which request computes which beam, and what is told at the end.
Imports no jax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from jaxllm.cache.pool import PagePool
from jaxllm.config import Resolved
from jaxllm.engine.output.beam_search import BeamSearch, Finished, Rules
from jaxllm.engine.output.counters import Counters
from jaxllm.engine.output.detok import Detokenizer
from jaxllm.engine.scheduling.request import PromptSharing, Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.logprobs import packed_from
from jaxllm.messages import GenerateRequest, RequestError, RequestTimes, TextDelta


class Beams:
    """The requests of one search. The first computes the prompt; then each beam is one of them,
    told its tokens one by one: it computes the last, and the most likely next ones of all beams
    decide how the search goes on. A beam that goes on in several ways is forked, one that does not
    is finished."""

    def __init__(self, rules: Rules, root: Request, scheduler: Scheduler):
        self.search = BeamSearch(rules)
        self.root, self._scheduler = root, scheduler
        self._family = PromptSharing([root], seats=rules.width)
        self._tops: dict[Request, list[tuple[int, float]]] = {}
        root.family, root.max_tokens, root.top = self._family, 1, max(root.top, self.search.needed)
        root.searches = True

    @property
    def members(self) -> list[Request]:
        """The requests that compute its beams now, best beam first."""
        return self._family.members

    def feed(self, request: Request, top: list[tuple[int, float]]) -> bool:
        """The most likely next tokens of a member, most likely first; True when they were the last
        of all, and the search is over."""
        members = self._family.members
        self._tops[request] = top
        if len(self._tops) < len(members):
            return False
        parents = self.search.step([self._tops[member] for member in members])
        self._tops.clear()
        self._go_on(parents)
        return not parents

    def end(self) -> None:
        """Give back whatever its members hold."""
        for member in self._family.members:
            self._scheduler.finish(member)

    def _go_on(self, parents: list[int]) -> None:
        """Every beam its request: losers leave first, so that their slots and pages are there for
        forks."""
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
    """All beam searches of an engine. `detokenizer` makes one for a request, or None; `eos_ids` end
    a sequence without being named. Tokens of sequences that are told are counted in `count`."""

    def __init__(
        self,
        scheduler: Scheduler,
        detokenizer: Callable[[Request], Detokenizer | None],
        eos_ids: frozenset[int],
        count: Counters,
    ):
        self._scheduler, self._detokenizer, self._eos_ids, self._count = (
            scheduler,
            detokenizer,
            eos_ids,
            count,
        )
        self._open: dict[str, Beams] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[str]:
        """The ids of their requests."""
        return iter(self._open)

    def clear(self) -> None:
        """Forget all searches, as if there had been none."""
        self._open.clear()

    def begin(self, root: Request, stops: frozenset[int]) -> bool:
        """Make the first request of a search from one that was just added to the scheduler, if it
        asks for one."""
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
        self._open[root.id] = Beams(rules, root, self._scheduler)
        return True

    def feed(self, request: Request, top: list[tuple[int, float]], now: float) -> list[TextDelta]:
        """The most likely next tokens of one of the beams; at the end of its search the deltas of
        its choices, one each."""
        beams = self._open[request.id]
        root = beams.root
        root.first_token_at, root.last_token_at = root.first_token_at or now, now
        if not beams.feed(request, top):
            return []
        del self._open[request.id]
        found = beams.search.finished[: root.params.n]
        self._count.generation_tokens += sum(len(one.beam.tokens) for one in found)
        return [self._told(root, index, one) for index, one in enumerate(found)]

    def stop(self, request_id: str, reason: str, error: str | None = None) -> list[TextDelta]:
        """End a search for another reason: the deltas of its choices. Nothing happens when there is
        none of this id."""
        beams = self._open.pop(request_id, None)
        if beams is None:
            return []
        beams.end()
        last = _last(beams.root, 0, reason)
        return [replace(last, index=index, error=error) for index in range(beams.root.params.n)]

    def owed(self) -> list[tuple[str, int]]:
        """Request and choice of everything that has not been told."""
        return [
            (beams.root.id, index)
            for beams in self._open.values()
            for index in range(beams.root.params.n)
        ]

    def _told(self, root: Request, index: int, one: Finished) -> TextDelta:
        """One sequence as a choice that says everything at once."""
        params, beam, text = root.params, one.beam, ""
        detok = self._detokenizer(root)
        if detok is not None:
            hidden = one.stop is not None and not params.include_stop_str_in_output
            text = detok.feed(beam.tokens[:-1] if hidden else beam.tokens).text + detok.finish()
        named = one.stop is not None and (params.ignore_eos or one.stop not in self._eos_ids)
        count = params.logprobs
        return replace(
            _last(root, index, "length" if one.stop is None else "stop"),
            token_ids=beam.tokens,
            text=text,
            logprobs=None if count is None else packed_from(beam.entries, count),
            stop_reason=one.stop if named else None,
            cumulative_logprob=beam.logprob,
        )


def check_search(
    request: GenerateRequest, resolved: Resolved, pools: Sequence[PagePool], eos_ids: frozenset[int]
) -> None:
    """Raises RequestError for a beam search that does not fit the engine: its slots, its pages, and
    how many likely tokens a step tells."""
    params, width = request.params, request.params.samples
    if not params.use_beam_search:
        return
    num_stops = len({*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_ids)})
    name = "n" if params.best_of is None else "best_of"
    if width > resolved.max_num_seqs:
        raise RequestError(
            f"a search with {width} beams needs as many slots, but --max-num-seqs is {resolved.max_num_seqs}",
            name,
        )
    if width + num_stops > resolved.max_logprobs:
        raise RequestError(
            f"a search with {width} beams and {num_stops} tokens that end it needs the {width + num_stops} most likely tokens of a step, "
            f"but --max-logprobs is {resolved.max_logprobs}; ask for fewer beams or raise it",
            name,
        )
    prompt = len(request.prompt_token_ids)
    tokens = min(resolved.max_model_len, prompt + (params.max_tokens or resolved.max_model_len)) - 1
    for pool, pages in zip(pools, most_pages(pools, prompt, tokens, width), strict=True):
        if pages <= pool.num_pages:
            continue
        raise RequestError(
            f"{width} beams of up to {tokens} tokens can need {pages} KV pages, but the pool has {pool.num_pages}; "
            "ask for fewer beams or lower max_tokens",
            "max_tokens",
            "kv_pool_too_small",
        )


def most_pages(pools: Sequence[PagePool], prompt: int, tokens: int, width: int) -> list[int]:
    """KV pages of each kind that so many beams can hold at most: they share the full pages of the
    prompt. Where those of any kind are given back behind a window, a beam that was preempted may
    find nothing shared; one more each is for what they are about to write."""
    if any(pool.behind(tokens) for pool in pools):
        return [width * (pool.most(tokens) + 1) for pool in pools]
    shared = prompt // pools[0].page_size
    return [shared + width * (pool.pages_for(tokens) - shared) for pool in pools]


def _last(root: Request, index: int, reason: str) -> TextDelta:
    """The end of a choice that says nothing."""
    return TextDelta(
        id=root.id,
        index=index,
        token_ids=[],
        text="",
        finish_reason=reason,
        num_cached_tokens=root.num_cached_tokens,
        times=RequestTimes(
            arrival=root.arrival,
            scheduled=root.scheduled_at,
            first_token=root.first_token_at,
            last_token=root.last_token_at,
            num_preemptions=root.num_preemptions,
        ),
    )
