"""The choices of one request: their seeds, and the ranking of `best_of`. Imports no jax."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from msgspec.structs import replace

from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.logprobs import total
from jaxllm.messages import GenerateRequest, TextDelta
from jaxllm.sampling.options import SamplingParams


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index`: the request's own for the first, unrelated 64-bit values for the
    others.
    """
    if index == 0:
        return seed
    digest = hashlib.sha256(
        b"jaxllm choice" + seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    ).digest()
    return int.from_bytes(digest[:8], "little")


class BestOfManager:
    """The requests with `best_of` above `n`, and the deltas of their choices."""

    def __init__(self) -> None:
        self._open: dict[str, BestOf] = {}

    def track(self, request: GenerateRequest) -> None:
        """Hold back the deltas of a new request, if its choices are ranked."""
        if request.params.samples > request.params.n and not request.params.use_beam_search:
            self._open[request.id] = BestOf(request.params)

    def untrack(self, request_id: str) -> None:
        """Forget a request, if it is tracked."""
        self._open.pop(request_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._open.clear()

    def undelivered(self, choices: Sequence[Request]) -> list[tuple[str, int]]:
        """(request id, choice index) of every choice whose end the client has not got."""
        if choices[0].id in self._open:
            return [(choices[0].id, index) for index in range(choices[0].params.n)]
        return [
            (choice.id, choice.index) for choice in choices if choice.status is not Status.FINISHED
        ]

    def deliverable(self, deltas: list[TextDelta]) -> list[TextDelta]:
        """The deltas of a step that the client may get now; of ranked choices the `n` best, when
        the last has ended.
        """
        if not self._open:
            return deltas
        found: list[TextDelta] = []
        for delta in deltas:
            best_of = self._open.get(delta.id)
            ready = [delta] if best_of is None else best_of.hold(delta)
            if best_of is not None and ready:
                del self._open[delta.id]
            found += ready
        return found


class BestOf:
    """Holds back the deltas of one request until all of its choices have ended.

    Then the `n` choices with the greatest sums of log-probabilities become choices 0 to n − 1, most
    likely first. Choices that failed rank last.
    """

    def __init__(self, params: SamplingParams):
        self._params = params
        self._held: list[list[TextDelta]] = [[] for _ in range(params.samples)]
        self._ended = 0

    def hold(self, delta: TextDelta) -> list[TextDelta]:
        """Keep a delta, which has the log-probabilities of its tokens. Returns the choices for the
        client after the last delta, before that nothing."""
        self._held[delta.index].append(delta)
        self._ended += delta.finish_reason is not None
        if self._ended < len(self._held):
            return []
        ranked = sorted((joined(deltas) for deltas in self._held), key=_rank)
        with_logprobs = self._params.logprobs is not None
        return [
            replace(choice, index=i, logprobs=choice.logprobs if with_logprobs else None)
            for i, choice in enumerate(ranked[: self._params.n])
        ]


def joined(deltas: list[TextDelta]) -> TextDelta:
    """All deltas of one choice as one."""
    tokens = [token for delta in deltas for token in delta.token_ids]
    packed = b"".join(delta.logprobs or b"" for delta in deltas)
    return replace(
        deltas[-1],
        token_ids=tokens,
        text="".join(delta.text for delta in deltas),
        logprobs=packed,
        prompt_logprobs=next(
            (delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None
        ),
        cumulative_logprob=total(packed, len(tokens)),
    )


def _rank(choice: TextDelta) -> tuple[bool, float]:
    assert choice.cumulative_logprob is not None
    return choice.error is not None, -choice.cumulative_logprob
