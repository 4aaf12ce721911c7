"""What the controller of several hosts does to its devices, as commands that followers do after it.

After the start, the devices of every host must run the same programs in the same order. So whatever
touches devices is one of these commands, and the controller tells it before it does it.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from jaxllm.engine.runtime.launch import Launch
from jaxllm.engine.scheduling.plan import Moves


class Run(msgspec.Struct, tag=True, frozen=True):
    """A launch: `Launch.to_bytes`."""

    launch: bytes


class Move(msgspec.Struct, tag=True, frozen=True):
    """Transfers between pool and host memory."""

    moves: Moves


class Reset(msgspec.Struct, tag=True, frozen=True):
    """Slot state and pages anew."""


class Asleep(msgspec.Struct, tag=True, frozen=True):
    """Free the devices; with `keep_weights` the weights go to host memory."""

    keep_weights: bool


class Awake(msgspec.Struct, tag=True, frozen=True):
    """Take the devices again, with the weights that were kept."""


class Reload(msgspec.Struct, tag=True, frozen=True):
    """Have the weights in a directory, by default the engine's own: in place of those of now, or of
    none when asleep."""

    directory: str | None


type Told = Run | Move | Reset | Asleep | Awake | Reload
type Command = Launch | Moves | Reset | Asleep | Awake | Reload

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told.__value__)


class Replayer(Protocol):
    """What follows."""

    def run(self, launch: Launch) -> object:
        """As of `Dispatcher`."""

    def move(self, moves: Moves) -> None:
        """As of `Runner`."""

    def reset(self) -> None:
        """As of `Dispatcher`."""

    def sleep(self, keep_weights: bool) -> None:
        """As of `Dispatcher`."""

    def wake(self) -> None:
        """As of `Dispatcher`."""

    def reload(self, directory: str | None) -> None:
        """Have weights that are read again, asleep or not."""


def encode(command: Command) -> bytes:
    """The command for another host."""
    match command:
        case Launch():
            return _encoder.encode(Run(command.to_bytes()))
        case Moves():
            return _encoder.encode(Move(command))
        case _:
            return _encoder.encode(command)


def replay(command: bytes, on: Replayer) -> None:
    """Do what the controller told. Raises ValueError when that is no command."""
    match _decoder.decode(command):
        case Run(launch):
            on.run(Launch.from_bytes(launch))
        case Move(moves):
            on.move(moves)
        case Reset():
            on.reset()
        case Asleep(keep_weights):
            on.sleep(keep_weights)
        case Awake():
            on.wake()
        case Reload(directory):
            on.reload(directory)
