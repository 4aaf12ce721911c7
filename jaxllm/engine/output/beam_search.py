"""The arithmetic of a beam search, by the rules of transformers' `generate`. Imports no jax.

Each step ranks all continuations of all beams by their sum of log-probabilities. Of the first
`width`, those that end the sequence are finished; their score is the sum divided by
length ** length_penalty. The first `width` that do not end become the next beams. The search is
over at `max_tokens`, or when `width` sequences have finished and `early_stopping` expects none
better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxllm.messages import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of one search.

    Attributes:
        width: how many beams, and how many finished sequences.
        max_tokens: the longest sequence.
        min_tokens: `stops` do not count among that many first tokens.
        stops: tokens that end a sequence.
        length_penalty: exponent of the length in a score.
        early_stopping: when a search with `width` finished sequences ends: at once (True), when
            the best beam scores no better at its length (False), or at no length ("never").
    """

    width: int
    max_tokens: int
    min_tokens: int = 0
    stops: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: bool | str = False


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence after the prompt, with one entry per token; `logprob` is their sum."""

    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0
    entries: list[TokenLogprobs] = field(default_factory=list)


class Finished(NamedTuple):
    """A sequence that has ended by the token `stop`, or at its greatest length where that is
    None."""

    score: float
    beam: Beam
    stop: int | None


class _Continuation(NamedTuple):
    logprob: float
    beam: int
    rank: int
    token: int
    value: float


class BeamSearch:
    """One search.

    Attributes:
        beams: to be computed next, best first.
        finished: the best sequences that have ended, best first.
    """

    def __init__(self, rules: Rules):
        self.rules = rules
        self.beams = [Beam()]
        self.finished: list[Finished] = []

    @property
    def needed(self) -> int:
        """How many of each beam's most likely next tokens `step` must get."""
        return self.rules.width + len(self.rules.stops)

    def step(self, tops: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
        """Select the next beams from the likely next tokens of each, (id, log-probability).

        Tokens stand most likely first, at least `needed` of them or the whole vocabulary.
        Returns the index of the old beam that each new one continues, [] when the search is over.
        """
        rules = self.rules
        length = len(self.beams[0].tokens) + 1
        last = length == rules.max_tokens
        going: list[_Continuation] = []
        for place, one in enumerate(self._ranked(tops, length)):
            stop = None
            if one.token in rules.stops:
                stop = one.token
            if place < rules.width and (last or stop is not None):
                self._finish(self._continued(one, tops), stop)
            elif stop is None and not last and len(going) < rules.width:
                going.append(one)
            if place >= rules.width and len(going) == rules.width:
                break
        if last or not going or self._is_over(going[0].logprob, length):
            return []
        self.beams = [self._continued(one, tops) for one in going]
        return [one.beam for one in going]

    def _ranked(
        self, tops: Sequence[Sequence[tuple[int, float]]], length: int
    ) -> list[_Continuation]:
        """All allowed continuations, best first; of equal ones that of the better beam."""
        early = length <= self.rules.min_tokens
        found = [
            _Continuation(beam.logprob + value, index, rank, token, value)
            for index, (beam, top) in enumerate(zip(self.beams, tops, strict=True))
            for rank, (token, value) in enumerate(top, 1)
            if not (early and token in self.rules.stops)
        ]
        return sorted(found, key=lambda one: (-one.logprob, one.beam, one.rank))

    def _continued(self, one: _Continuation, tops: Sequence[Sequence[tuple[int, float]]]) -> Beam:
        entry = TokenLogprobs(
            token_id=one.token, logprob=one.value, rank=one.rank, top=list(tops[one.beam])
        )
        beam = self.beams[one.beam]
        return Beam([*beam.tokens, one.token], one.logprob, [*beam.entries, entry])

    def _finish(self, beam: Beam, stop: int | None) -> None:
        self.finished.append(Finished(self._score(beam.logprob, len(beam.tokens)), beam, stop))
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self.rules.width :]

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self.rules.length_penalty)

    def _is_over(self, best: float, length: int) -> bool:
        rules = self.rules
        if len(self.finished) < rules.width:
            return False
        if rules.early_stopping is True:
            return True
        if rules.early_stopping == "never" and rules.length_penalty > 0:
            hoped = rules.max_tokens
        else:
            hoped = length
        return self._score(best, hoped) <= self.finished[-1].score
