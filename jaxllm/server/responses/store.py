"""Responses kept in memory for clients that refer to them later: bounded by count, bytes and age.

A response that continues another one shares its history. So the items of a turn stay as long as a
stored response continues it, and count as long.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MAX_RESPONSES = 4096
MAX_BYTES = 256 << 20
MAX_AGE = 24 * 3600.0  # seconds
OVERHEAD = 512  # bytes of an entry beside its texts

type Owner = bytes
type Encoded = tuple[str, bytes]  # id and JSON of an item


@dataclass(eq=False, slots=True)
class Turn:
    """Input and output items of one response, after those of an earlier one.

    Attributes:
        users: later turns that are kept, and the stored response whose turn it is.
        number: counts turns as they are made.
    """

    before: Turn | None
    items: list[Encoded] = field(default_factory=list)
    users: int = 0
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        return OVERHEAD + sum(OVERHEAD + 2 * len(id) + len(item) for id, item in self.items)

    def history(self) -> list[Encoded]:
        """All items up to this turn's last, oldest first."""
        turns = [self]
        turn = self.before
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return [item for turn in reversed(turns) for item in turn.items]


@dataclass(eq=False)
class Stored:
    """A stored response.

    Attributes:
        inputs: how many items of the turn were its input.
        body: its JSON.
        extra: bytes that it takes beside, such as the events of its stream.
    """

    id: str
    owner: Owner
    turn: Turn
    inputs: int
    body: bytes
    extra: int = 0
    expires: float = 0.0

    @property
    def size(self) -> int:
        """Bytes that it takes without its turn, about."""
        return OVERHEAD + len(self.body) + self.extra

    def json(self) -> bytes:
        """The response as it is now."""
        return self.body

    def forgotten(self) -> None:
        """Called when it leaves the store."""

    def input_items(self) -> list[Encoded]:
        """What it was made from, oldest first: earlier turns and its own input."""
        if self.turn.before is not None:
            before = self.turn.before.history()
        else:
            before = []
        return before + self.turn.items[: self.inputs]


class ResponseStore:
    """Responses by id. The oldest leaves when there are too many, or too many bytes.

    Attributes:
        bytes: taken by all responses and their turns, about.
    """

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._clock = clock
        self._stored: dict[str, Stored] = {}  # oldest first
        # Copies of items, by the numbers of their turns
        self._items: dict[tuple[Owner, str], dict[int, bytes]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def find(self, id: str, owner: Owner) -> Stored | None:
        """The response, if this owner made it and it is still there."""
        self._trim()
        response = self._stored.get(id)
        if response is not None and response.owner == owner:
            return response
        return None

    def find_item(self, id: str, owner: Owner) -> bytes | None:
        """The JSON of an item of a stored response or of a turn before, as the latest turn has
        it."""
        self._trim()
        copies = self._items.get((owner, id))
        if copies is None:
            return None
        return copies[max(copies)]

    def keep(self, stored: Stored) -> None:
        """Store a response."""
        stored.expires = self._clock() + MAX_AGE
        self._stored[stored.id] = stored
        self.bytes += stored.size
        self._hold(stored.turn, stored.owner)
        self._trim()

    def grow(self, stored: Stored, extra: int) -> None:
        """Count more bytes of a response, if it is still stored."""
        stored.extra += extra
        if stored.id in self._stored:
            self.bytes += extra
            self._trim()

    @contextmanager
    def changing(self, stored: Stored) -> Iterator[None]:
        """Count what a change of a response adds."""
        before = stored.size + stored.turn.size
        yield
        if stored.id in self._stored:
            self.bytes += stored.size + stored.turn.size - before
            self._index(stored.turn, stored.owner)
            self._trim()

    def drop(self, stored: Stored) -> None:
        """Forget a response. Those that continue it keep what they need of it."""
        del self._stored[stored.id]
        self.bytes -= stored.size
        self._release(stored.turn, stored.owner)
        stored.forgotten()

    def _trim(self) -> None:
        """Forget what is too old or too much."""
        now = self._clock()
        while self._stored:
            oldest = next(iter(self._stored.values()))
            full = len(self._stored) > self._max_responses or self.bytes > self._max_bytes
            if not full and oldest.expires > now:
                return
            self.drop(oldest)

    def _hold(self, turn: Turn | None, owner: Owner) -> None:
        """One more user of a turn; the first makes it count, and all turns before it."""
        while turn is not None:
            turn.users += 1
            if turn.users > 1:
                return
            self.bytes += turn.size
            self._index(turn, owner)
            turn = turn.before

    def _release(self, turn: Turn | None, owner: Owner) -> None:
        """One user of a turn less; after the last it no longer counts."""
        while turn is not None:
            turn.users -= 1
            if turn.users:
                return
            self.bytes -= turn.size
            for id, _ in turn.items:
                copies = self._items.get((owner, id), {})
                copies.pop(turn.number, None)
                if not copies:
                    self._items.pop((owner, id), None)
            turn = turn.before

    def _index(self, turn: Turn, owner: Owner) -> None:
        for id, item in turn.items:
            self._items.setdefault((owner, id), {})[turn.number] = item
