"""What an operator has an engine do: one name each, from the wire to the devices of every host.
Imports no jax."""

from __future__ import annotations

import msgspec


class Profile(msgspec.Struct, tag=True, frozen=True):
    """Start (or stop) a trace of the engine's process."""

    start: bool


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Drop every cached prefix; with `running`, also while requests run."""

    running: bool


class Sleep(msgspec.Struct, tag=True, frozen=True):
    """Free device memory: at level 1 the weights go to host memory, at level 2 they are dropped."""

    level: int

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights go to host memory."""
        return self.level == 1


class WakeUp(msgspec.Struct, tag=True, frozen=True):
    """Take the memory again, with the weights that were kept."""


class UpdateWeights(msgspec.Struct, tag=True, frozen=True):
    """Take the weights of the checkpoint in `directory`, asleep or not; None: those that the engine
    was started with, or has taken since, are read again."""

    directory: str | None
