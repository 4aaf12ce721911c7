"""The ranking of `best_of`: deltas are held back until all choices have ended. Imports no jax."""

from __future__ import annotations

from msgspec.structs import replace

from jaxllm.logprobs import total
from jaxllm.messages import TextDelta
from jaxllm.sampling.options import SamplingParams


class BestOf:
    """Holds back the deltas of one request with `best_of` above `n` until all choices have ended.

    Then the `n` choices with the greatest sums of log-probabilities become choices 0 to n − 1, most
    likely first. Choices that failed rank last.
    """

    def __init__(self, params: SamplingParams):
        self._params = params
        self._held: list[list[TextDelta]] = [[] for _ in range(params.samples)]
        self._ended = 0

    @property
    def ended(self) -> bool:
        """Whether all choices have ended."""
        return self._ended == len(self._held)

    def hold(self, delta: TextDelta) -> list[TextDelta]:
        """Keep a delta, which has the log-probabilities of its tokens. Returns the choices for the
        client after the last delta, before that nothing."""
        self._held[delta.index].append(delta)
        self._ended += delta.finish_reason is not None
        if not self.ended:
            return []
        ranked = sorted((_scored(joined(deltas)) for deltas in self._held), key=_rank)
        with_logprobs = self._params.logprobs is not None
        return [
            replace(choice, index=i, logprobs=choice.logprobs if with_logprobs else None)
            for i, choice in enumerate(ranked[: self._params.n])
        ]


def joined(deltas: list[TextDelta]) -> TextDelta:
    """All deltas of one choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    packed = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return replace(
        deltas[-1],
        token_ids=[token for delta in deltas for token in delta.token_ids],
        text="".join(delta.text for delta in deltas),
        logprobs=b"".join(packed) if packed else None,
        prompt_logprobs=next(
            (delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None
        ),
    )


def _scored(choice: TextDelta) -> TextDelta:
    """With the sum of its log-probabilities."""
    return replace(choice, cumulative_logprob=total(choice.logprobs or b"", len(choice.token_ids)))


def _rank(choice: TextDelta) -> tuple[bool, float]:
    assert choice.cumulative_logprob is not None
    return choice.error is not None, -choice.cumulative_logprob
