"""How long to look out for requests before the next step is planned. Imports no jax."""

from __future__ import annotations

TARGET = 1e-3  # seconds between the launch of a step and the end of the one before it: the host's margin
GAIN = 0.2
MOST = 20e-3  # seconds; what a request gains by more is little, and so is what is lost when steps become short


class Patience:
    """A step that is planned while the one before it runs could begin without a request that comes meanwhile, which then waits for a
    whole step more. So the later it is planned the better, as long as it is launched before the device has nothing to do: `seconds`
    from now. It is found by what is seen: how long the host, once it had launched, still waited for the step before. Only turns before
    which somebody looked out teach anything."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def learn(self, margin: float) -> None:
        """After a turn: seconds from the launch of a step to the end of the one before it. None left means that it came too late."""
        if margin < TARGET / 3:
            self.seconds /= 2
        else:
            self.seconds = min(MOST, max(0.0, self.seconds + GAIN * (margin - TARGET)))
