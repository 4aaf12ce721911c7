"""The choices of one request: what each draws by, and which are told when more are generated than
returned. Imports no jax."""

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
    """The requests with `best_of` above `n`, and what their choices have said."""

    def __init__(self) -> None:
        self._open: dict[str, BestOf] = {}

    def begin(self, request: GenerateRequest) -> None:
        """Take note of a request whose choices compete; of others none is taken."""
        if request.params.samples > request.params.n and not request.params.use_beam_search:
            self._open[request.id] = BestOf(request.params)

    def clear(self) -> None:
        """Forget all of them."""
        self._open.clear()

    def owed(self, choices: Sequence[Request]) -> list[tuple[str, int]]:
        """Request and choice of what has not been told of a request."""
        if choices[0].id in self._open:
            return [(choices[0].id, index) for index in range(choices[0].params.n)]
        return [
            (choice.id, choice.index) for choice in choices if choice.status is not Status.FINISHED
        ]

    def told(self, deltas: list[TextDelta]) -> list[TextDelta]:
        """Of a step's deltas those that may be told now, and at the end of a contest those of its
        winners.
        """
        if not self._open:
            return deltas
        told: list[TextDelta] = []
        for delta in deltas:
            contest = self._open.get(delta.id)
            found = [delta] if contest is None else contest.take(delta)
            if contest is not None and found:
                del self._open[delta.id]
            told += found
        return told


class BestOf:
    """Holds back what the choices of one request say until all have ended, then tells the `n` with
    the greatest sums of log-probabilities as choices 0 to n − 1, most likely first. A choice that
    failed comes last."""

    def __init__(self, params: SamplingParams):
        self._params = params
        self._said: list[list[TextDelta]] = [[] for _ in range(params.samples)]
        self._ended = 0

    def take(self, delta: TextDelta) -> list[TextDelta]:
        """A delta of a choice, with the log-probabilities of its tokens. Nothing comes back until
        the last choice ends."""
        self._said[delta.index].append(delta)
        self._ended += delta.finish_reason is not None
        if self._ended < len(self._said):
            return []
        ranked = sorted((joined(said) for said in self._said), key=_rank)
        shown = self._params.logprobs is not None
        return [
            replace(one, index=i, logprobs=one.logprobs if shown else None)
            for i, one in enumerate(ranked[: self._params.n])
        ]


def joined(said: list[TextDelta]) -> TextDelta:
    """Everything that one choice said, as one delta."""
    tokens = [token for delta in said for token in delta.token_ids]
    packed = b"".join(delta.logprobs or b"" for delta in said)
    return replace(
        said[-1],
        token_ids=tokens,
        text="".join(delta.text for delta in said),
        logprobs=packed,
        prompt_logprobs=next(
            (delta.prompt_logprobs for delta in said if delta.prompt_logprobs is not None), None
        ),
        cumulative_logprob=total(packed, len(tokens)),
    )


def _rank(choice: TextDelta) -> tuple[bool, float]:
    assert choice.cumulative_logprob is not None
    return choice.error is not None, -choice.cumulative_logprob
