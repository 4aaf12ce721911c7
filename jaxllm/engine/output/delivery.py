"""When clients get the deltas of a request that does not want each one as it comes. Imports no
jax."""

from __future__ import annotations

from jaxllm.engine.output.best_of import BestOf, joined
from jaxllm.messages import TextDelta
from jaxllm.sampling.options import SamplingParams


class StreamInterval:
    """Joins the deltas of one request until a choice has `stream_interval` new tokens. The first
    token of a choice goes at once, and its end takes the others along."""

    def __init__(self, params: SamplingParams):
        self._interval = params.stream_interval
        self._open = params.samples
        self._held: list[list[TextDelta]] = [[] for _ in range(params.samples)]
        # New tokens of each choice; so the first completes an interval
        self._tokens = [params.stream_interval - 1] * params.samples

    @property
    def ended(self) -> bool:
        """Whether all choices have ended."""
        return not self._open

    def hold(self, delta: TextDelta) -> list[TextDelta]:
        """Keep a delta. Returns what the client gets now: all of its choice that was kept, as one,
        or nothing."""
        held = self._held[delta.index]
        index = delta.index
        held.append(delta)
        self._tokens[index] += len(delta.token_ids)
        self._open -= delta.finish_reason is not None
        if self._tokens[index] < self._interval and delta.finish_reason is None:
            return []
        self._held[index] = []
        self._tokens[index] = 0
        return [joined(held)]


type Holder = BestOf | StreamInterval


def holder(params: SamplingParams) -> Holder | None:
    """What holds back the deltas of a request; None where each goes at once."""
    if params.ranked:
        return BestOf(params)
    if params.stream_interval > 1:
        return StreamInterval(params)
    return None


def deliverable(holders: dict[str, Holder], deltas: list[TextDelta]) -> list[TextDelta]:
    """The deltas of a step that clients may get now. `holders` has the requests that have one, and
    loses those that end."""
    if not holders:
        return deltas
    found: list[TextDelta] = []
    for delta in deltas:
        held_by = holders.get(delta.id)
        if held_by is None:
            found.append(delta)
            continue
        found += held_by.hold(delta)
        if held_by.ended:
            del holders[delta.id]
    return found
