"""How long to look out for requests before the next step is planned. Imports no jax."""

from __future__ import annotations

import math

# Seconds between the launch of a step and the end of the one before it: the host's margin
TARGET = 1e-3
GAIN = 0.2
# Seconds; what a request gains by more is little, and so is what is lost when steps become short
MOST = 20e-3


class WaitEstimate:
    """A step that is planned while the one before it runs could begin without a request that comes
    meanwhile, which then waits for a whole step more. So the later it is planned the better, as
    long as it is launched before the device has nothing to do: `seconds` from now. It is found by
    what is seen: how long the host, once it had launched, still waited for the step before. Only
    turns before which somebody looked out teach anything."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def learn(self, margin: float) -> None:
        """After a turn: seconds from the launch of a step to the end of the one before it. None
        left means that it came too late."""
        if late(margin):
            self.seconds /= 2
        else:
            self.seconds = min(MOST, max(0.0, self.seconds + GAIN * (margin - TARGET)))


def late(margin: float) -> bool:
    """Whether a step was launched so late that the device may have waited for it."""
    return margin < TARGET / 3


class ArrivalWait:
    """Looks out while a step of decodes alone runs, and while one with chunks does, which is
    longer: by a patience of its own, and for no more time than its chunks surely add."""

    def __init__(self) -> None:
        self._decodes, self._chunks = WaitEstimate(), WaitEstimate()
        self._now: tuple[WaitEstimate, float] | None = None  # while what runs, and the longest
        self._looked: WaitEstimate | None = None

    def begin(self) -> float:
        """Seconds to look out before the next turn."""
        if self._now is None:
            return 0.0
        self._looked, most = self._now
        return min(self._looked.seconds, most)

    def launched(self, added: float | None, margin: float) -> None:
        """After a turn: seconds that the chunks of the step it launched add, None for one of
        decodes alone, and from then to the end of the step before. To plan chunks takes the host
        longer, which says nothing of other steps; but what comes late beside chunks is unlearned
        whatever follows, for steps of decodes alone may not come."""
        if self._looked is not None and (
            added is None or (self._looked is self._chunks and late(margin))
        ):
            self._looked.learn(margin)
        self._now = (self._decodes, math.inf) if added is None else (self._chunks, added)
        self._looked = None

    def stop(self) -> None:
        """After a turn that left nothing running, or nothing beside it."""
        self._now = self._looked = None
