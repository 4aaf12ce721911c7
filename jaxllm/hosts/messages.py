"""What the hosts of a group say to each other, as msgpack."""

from __future__ import annotations

import msgspec


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A follower's first words.

    Attributes:
        rank: its number in the group.
        facts: what must be the same on every host, by name.
    """

    rank: int
    facts: dict[str, str]


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The group is complete."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The sender ends, or refuses the receiver, for this reason."""

    reason: str


class Opinion(msgspec.Struct, tag=True, frozen=True):
    """A follower's value, to agree on one."""

    value: bytes


class Opinions(msgspec.Struct, tag=True, frozen=True):
    """The values of all hosts, by rank."""

    values: list[bytes]


class Command(msgspec.Struct, tag=True, frozen=True):
    """What followers do as the controller does it."""

    data: bytes


class End(msgspec.Struct, tag=True, frozen=True):
    """The controller has stopped in order."""


type Message = Hello | Welcome | Failed | Opinion | Opinions | Command | End

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message.__value__)


def encode(message: Message) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message in a frame. Raises ValueError when there is none."""
    return _decoder.decode(data)
