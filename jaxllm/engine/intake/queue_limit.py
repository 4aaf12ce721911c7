"""How many choices may wait. Imports no jax."""

from __future__ import annotations

from jaxllm.config import Resolved
from jaxllm.messages import RequestError


class QueueLimit:
    """The choices that an engine takes beside those that run."""

    def __init__(self, resolved: Resolved):
        self._queued = resolved.max_num_queued_reqs
        self._limit = resolved.max_num_seqs + resolved.max_num_queued_reqs

    def has_space(self, present: int, choices: int) -> bool:
        """Whether these `choices` are taken beside those that are `present`. An idle engine takes
        any number."""
        return present == 0 or present + choices <= self._limit

    def check(self, present: int, choices: int) -> None:
        """Raises RequestError where they are not taken."""
        if not self.has_space(present, choices):
            raise RequestError(
                f"the queue is full ({self._queued} requests); retry later", None, "queue_full"
            )
