"""What the controller of several hosts does to its devices, as commands that followers do after it.

After the start, the devices of every host must run the same programs in the same order. So whatever
touches devices is one of these commands, and the controller tells it before it does it.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from jaxllm.commands import Sleep, UpdateWeights, WakeUp
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


type Told = Run | Move | Reset | Sleep | WakeUp | UpdateWeights
type Command = Launch | Moves | Reset | Sleep | WakeUp | UpdateWeights

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

    def sleep(self, level: int) -> None:
        """As of `Dispatcher`."""

    def wake_up(self) -> None:
        """As of `Dispatcher`."""

    def update_weights(self, directory: str | None) -> None:
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
        case Sleep(level):
            on.sleep(level)
        case WakeUp():
            on.wake_up()
        case UpdateWeights(directory):
            on.update_weights(directory)
