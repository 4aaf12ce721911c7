"""What enters and leaves the prefix cache, in order, for whoever keeps a copy of it, such as a
router. Imports no jax.

The events and their fields are vLLM's (`vllm/distributed/kv_events.py`). They carry token ids and
hashes, and no text, no salt and no key.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence

import msgspec

# names of the media; the first stands for any accelerator
DEVICE = "GPU"
HOST = "CPU"
HASH = struct.Struct(">24xQ")  # what is told of a SHA-256
MAX_ITEMS = 4096  # tokens, or hashes where there are none, of one event; one page may have more
MAX_EVENTS = 64  # of a batch


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Consecutive pages of one sequence can be found.

    Attributes:
        parent_block_hash: of the page before; None at the start of a sequence.
        token_ids: of these pages; empty for host memory, whose pages were on the device before.
        extra_keys: of each page, what tells it from pages of the same tokens: a digest of the salt
            and the adapter, at the start of a sequence. None when no page has any.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Pages can no longer be found in that memory."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """No page can be found in any memory."""


type KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


def without_tokens(event: KVEvent) -> KVEvent:
    """The event for who knows the tokens, or needs hashes alone."""
    if isinstance(event, BlockStored):
        return msgspec.structs.replace(event, token_ids=[])
    return event


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of a step, or a part of them, in order.

    Attributes:
        ts: seconds since the epoch.
        data_parallel_rank: the engine's number among those of its model, which a publisher knows.
    """

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int = 0


class KVEvents:
    """Collects events; `flush` gives them to `listeners`."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.listeners: list[Callable[[KVEventBatch], None]] = []
        self._pending: list[KVEvent] = []
        # Pages that left that memory since the last event
        self._removed: list[bytes] = []
        self._medium = DEVICE

    def stored(
        self,
        keys: Sequence[bytes],
        parent: bytes | None,
        tokens: list[int],
        extra: bytes | None = None,
        medium: str = DEVICE,
    ) -> None:
        """Consecutive pages can be found. `extra` tells the start of their sequence from others'.
        Pages in host memory come without tokens."""
        self._end_removed()
        hashes = shorts(keys)
        above = None if parent is None else shorts([parent])[0]
        most = max(1, MAX_ITEMS // self.page_size)
        for first in range(0, len(hashes), most):
            part = hashes[first : first + most]
            stored = BlockStored(
                block_hashes=part,
                parent_block_hash=above,
                token_ids=tokens[first * self.page_size : (first + most) * self.page_size],
                block_size=self.page_size,
                lora_id=None,
                medium=medium,
                lora_name=None,
            )
            if extra is not None and first == 0:
                stored.extra_keys = [(extra.hex()[:16],), *[None] * (len(part) - 1)]
            self._pending.append(stored)
            above = part[-1]

    def removed(self, key: bytes, medium: str = DEVICE) -> None:
        """A page can no longer be found."""
        if medium != self._medium:
            self._end_removed()
            self._medium = medium
        self._removed.append(key)

    def _end_removed(self) -> None:
        """Make events of the pages removed since the last one."""
        if self._removed:
            hashes = shorts(self._removed)
            self._removed = []
            for first in range(0, len(hashes), MAX_ITEMS):
                part = hashes[first : first + MAX_ITEMS]
                self._pending.append(BlockRemoved(part, self._medium))

    def cleared(self) -> None:
        """No page can be found any more. What was pending before tells nothing then."""
        self._pending = [AllBlocksCleared()]
        self._removed = []

    def flush(self) -> None:
        """Give what is pending to the listeners."""
        self._end_removed()
        if not self._pending:
            return
        pending = self._pending
        self._pending = []
        for start in range(0, len(pending), MAX_EVENTS):
            batch = KVEventBatch(time.time(), pending[start : start + MAX_EVENTS])
            for listener in self.listeners:
                listener(batch)


def shorts(keys: Sequence[bytes]) -> list[int]:
    """Pages' hashes as consumers know them: the last 8 bytes of the cache's own, unsigned and
    big-endian, as vLLM shortens its hashes."""
    return [number for (number,) in HASH.iter_unpack(b"".join(keys))]
