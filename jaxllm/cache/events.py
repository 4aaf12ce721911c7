"""What enters and leaves the prefix cache, in order, for whoever keeps a copy of it, such as a
router. Imports no jax.

The events and their fields are vLLM's (`vllm/distributed/kv_events.py`). They carry token ids and
hashes, and no text, no salt and no key.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

DEVICE, HOST = "GPU", "CPU"  # names of the media; the first stands for any accelerator
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


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of a step, or a part of them, in order.

    Attributes:
        ts: seconds since the epoch.
        data_parallel_rank: always 0: an engine is one replica.
    """

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int = 0


class KVEvents:
    """Collects events; `flush` gives them to `listeners`. Consecutive ones are merged."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.listeners: list[Callable[[KVEventBatch], None]] = []
        self._pending: list[KVEvent] = []

    def stored(
        self,
        key: bytes,
        parent: bytes | None,
        tokens: list[int],
        extra: bytes | None = None,
        medium: str = DEVICE,
    ) -> None:
        """A page can be found. `extra` tells the start of its sequence from others'."""
        last = self._pending[-1] if self._pending else None
        above = None if parent is None else short(parent)
        if (
            type(last) is BlockStored
            and above is not None
            and last.block_hashes[-1] == above
            and last.medium == medium
            and len(last.token_ids) < MAX_ITEMS
        ):
            last.block_hashes.append(short(key))
            last.token_ids += tokens
            if last.extra_keys is not None:
                last.extra_keys.append(None)
            return
        stored = BlockStored(
            block_hashes=[short(key)],
            parent_block_hash=above,
            token_ids=tokens,
            block_size=self.page_size,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=None if extra is None else [(extra.hex()[:16],)],
        )
        self._pending.append(stored)

    def removed(self, key: bytes, medium: str = DEVICE) -> None:
        """A page can no longer be found."""
        last = self._pending[-1] if self._pending else None
        if (
            type(last) is BlockRemoved
            and last.medium == medium
            and len(last.block_hashes) < MAX_ITEMS
        ):
            last.block_hashes.append(short(key))
        else:
            self._pending.append(BlockRemoved([short(key)], medium))

    def cleared(self) -> None:
        """No page can be found any more. What was pending before tells nothing then."""
        self._pending = [AllBlocksCleared()]

    def flush(self) -> None:
        """Give what is pending to the listeners."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        for start in range(0, len(pending), MAX_EVENTS):
            batch = KVEventBatch(time.time(), pending[start : start + MAX_EVENTS])
            for listener in self.listeners:
                listener(batch)


def short(key: bytes) -> int:
    """A page's hash as consumers know it: the last 8 bytes of the cache's own, which is unsigned
    and big-endian, as vLLM shortens its hashes."""
    return int.from_bytes(key[-8:])
