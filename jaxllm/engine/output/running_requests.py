"""The requests of a generating engine that have entered and not ended. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxllm.engine.output.beam_requests import BeamSearchManager
from jaxllm.engine.output.delivery import Holder, holder
from jaxllm.engine.output.output_processor import lost_choice
from jaxllm.engine.output.request_state import RequestState
from jaxllm.engine.scheduling.request import Request
from jaxllm.messages import TextDelta


@dataclass(frozen=True)
class RunningRequests:
    """Requests, by id.

    Attributes:
        beams: the beam searches.
        states: all others.
        holders: what holds back the deltas of those that do not want each one as it comes.
    """

    beams: BeamSearchManager
    states: dict[str, RequestState]
    holders: dict[str, Holder] = field(default_factory=dict)

    @property
    def ids(self) -> list[str]:
        """Those that run or wait."""
        return [*self.states, *self.beams.open]

    @property
    def choices(self) -> list[Request]:
        """The choices of all that are no beam searches."""
        return [choice for state in self.states.values() for choice in state.choices]

    def add(self, state: RequestState) -> None:
        """Take a new request, or start its beam search."""
        root = state.choices[0]
        if self.beams.start_search(root, root.stops):
            return
        if (held_by := holder(root.params)) is not None:
            self.holders[root.id] = held_by
        self.states[root.id] = state

    def remove(self, request_id: str) -> None:
        """Drop a request of which nobody has heard yet."""
        self.beams.stop_search(request_id, "error")
        self.holders.pop(request_id, None)
        self.states.pop(request_id, None)

    def lost(self) -> list[TextDelta]:
        """The ends of all requests, for an engine that is about to forget them. Reads nothing but
        which choices clients still wait for: the rest may be what is broken."""
        undelivered = self.beams.undelivered()
        for state in self.states.values():
            undelivered += state.undelivered()
        return [lost_choice(request_id, index) for request_id, index in undelivered]

    def clear(self) -> None:
        """Forget all."""
        self.beams.open.clear()
        self.states.clear()
        self.holders.clear()
