"""How long to wait for new requests before the next step is planned. Imports no jax."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

# Seconds between the launch of a step and the end of the one before it: the host's margin. The
# device has the forward before the rest of the step is launched, so little of it idles if that is
# used up
TARGET = 0.4e-3
LATE = 0.15e-3  # seconds; to find that a step has ended takes as long
GAIN = 0.2
# Seconds since a request came, after which none is waited for: whoever waits is late at times
RECENT = 1.0
# Seconds; a request gains little from a longer wait, and little is lost when steps become short
MAX_WAIT = 20e-3


class WaitEstimate:
    """Learns how many `seconds` from now a step can be launched without idling the device;
    `was_late` if the turn before was late.

    A request that arrives after a step was planned waits for a whole step more. So a step is
    planned as late as possible, but before the step that runs ends. The margin is measured: how
    long the host still waits for the running step after a launch. Only turns that waited for
    requests teach anything.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.was_late = False

    def learn(self, margin: float) -> None:
        """Update after a turn, from the seconds between the launch of its step and the end of the
        step before. A margin near 0 means that the launch was too late."""
        if not late(margin):
            self.seconds = min(MAX_WAIT, max(0.0, self.seconds + GAIN * (margin - TARGET)))
        elif self.was_late:  # not by chance: steps have become shorter
            self.seconds /= 2
        else:
            self.seconds = max(0.0, self.seconds - TARGET)
        self.was_late = late(margin)


def late(margin: float) -> bool:
    """Whether a step was launched so late that the device may have waited for it."""
    return margin < LATE


class ArrivalWait:
    """How long to wait for requests while some come, with one estimate while decodes alone run and
    one while chunks run too. The latter is limited to the seconds that the chunks certainly add.

    `clock` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrived = -math.inf
        self._decodes = WaitEstimate()
        self._chunks = WaitEstimate()
        # The estimate for the step that runs, and the longest wait
        self._now: tuple[WaitEstimate, float] | None = None
        self._used: WaitEstimate | None = None

    def request_arrived(self) -> None:
        """After a request has come: another one may."""
        self._arrived = self._clock()

    def wait_seconds(self) -> float:
        """Seconds to wait before the next turn, which will teach the estimate used."""
        if self._now is None or self._clock() - self._arrived > RECENT:
            return 0.0
        self._used, limit = self._now
        return min(self._used.seconds, limit)

    def step_launched(self, added: float | None, margin: float) -> None:
        """Learn from a turn that launched a step while another one ran.

        `added` is the seconds that the step's chunks add, None for decodes alone; `margin` the
        seconds from the launch to the end of the step before. Planning chunks takes the host
        longer, so such turns teach nothing, except that a launch beside chunks was late: steps of
        decodes alone, which would teach that otherwise, may not come.
        """
        if self._used is not None and (
            added is None or (self._used is self._chunks and late(margin))
        ):
            self._used.learn(margin)
        elif not late(margin):
            self._chunks.was_late = False
        if added is None:
            self._now = (self._decodes, math.inf)
        else:
            self._now = (self._chunks, added)
        self._used = None

    def device_idle(self) -> None:
        """After a turn that left no step running, or launched none beside a running one."""
        self._now = self._used = None
        self._decodes.was_late = self._chunks.was_late = False
