"""The hosts that run one engine: a controller, which decides, and followers, which do the same on
their devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

JOIN_SECONDS = 1800.0  # until every host is there; each may download the model before
RETRY_SECONDS = 0.5  # between two tries to reach the network or the controller
TELL_SECONDS = 30.0  # between two log lines about hosts that are missing
LOST_STATUS = 75  # exit status of an engine process that has said why its group ends
MAX_REASON = 500  # characters of what another host gives as the reason of its end

type Lost = Callable[[str], None]


class GroupError(Exception):
    """The group has lost a host."""


@dataclass(frozen=True)
class Place:
    """A host's place in its group.

    Attributes:
        rank: 0 is the controller.
        count: hosts.
        host, port: where the controller listens.
        key: what every host has and nobody else.
    """

    rank: int
    count: int
    host: str
    port: int
    key: bytes

    @property
    def where(self) -> str:
        """The controller's address, for messages."""
        if ":" in self.host:
            return f"[{self.host}]:{self.port}"
        return f"{self.host}:{self.port}"


class Hosts(Protocol):
    """What an engine's start asks of the group."""

    @property
    def count(self) -> int:
        """Hosts in the group."""

    def agree(self, value: Any) -> list[Any]:
        """The values of all hosts by rank, the same on each; plain data. Every host calls it as
        often and in the same order. Raises GroupError."""


class Alone:
    """One host is no group."""

    count = 1

    def agree(self, value: Any) -> list[Any]:
        """As of `Hosts`."""
        return [value]


ALONE = Alone()


def pack(value: Any) -> bytes:
    """Plain data to agree on."""
    return msgspec.msgpack.encode(value)


def unpack(values: list[bytes]) -> list[Any]:
    """The values of all hosts."""
    return [msgspec.msgpack.decode(value) for value in values]


def difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """In what another host differs from the controller, or None."""
    for name in sorted(ours.keys() | theirs.keys()):
        our_value = ours.get(name, "nothing")
        their_value = theirs.get(name, "nothing")
        if our_value != their_value:
            return f"{name} is {their_value:.80} here and {our_value:.80} on the controller"
    return None


def shown(reason: str) -> str:
    """A reason of another host, on one line and not too long."""
    text = " ".join(reason.split())
    return "".join(character if character.isprintable() else "?" for character in text)[:MAX_REASON]
