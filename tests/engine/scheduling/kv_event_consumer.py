"""A consumer of KV events, written from the text of their format and sharing no code with what
makes them: it holds the set of cached blocks that a publisher tells of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

ARRAY_FIELDS = {
    "BlockStored": "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name "
    "extra_keys",
    "BlockRemoved": "block_hashes medium",
    "AllBlocksCleared": "",
}


class Consumer:
    """Feed it payloads in the order of their numbers.

    Attributes:
        blocks: hashes by medium.
        tokens: of each block ever told of, all tokens of its sequence up to its end, and what
            tells the sequence from others.
    """

    def __init__(self) -> None:
        self.blocks: dict[str, set[int]] = {}
        self.tokens: dict[int, tuple[tuple[int, ...], Any]] = {}

    def feed(self, payload: bytes) -> None:
        """One message."""
        stamp, events, rank = msgspec.msgpack.decode(payload)
        assert stamp > 0 and rank == 0
        for event in events:
            self._apply(event if isinstance(event, dict) else named(event))

    def _apply(self, event: dict[str, Any]) -> None:
        held = self.blocks.setdefault(event.get("medium", ""), set())
        match event["type"]:
            case "BlockStored":
                hashes = event["block_hashes"]
                assert not held & set(hashes) and len(set(hashes)) == len(hashes)
                held |= set(hashes)
                self._learn(event)
            case "BlockRemoved":
                assert set(event["block_hashes"]) <= held, "a block leaves that was not there"
                held -= set(event["block_hashes"])
            case "AllBlocksCleared":
                self.blocks.clear()
            case other:
                raise AssertionError(other)

    def _learn(self, event: dict[str, Any]) -> None:
        """Chain the tokens of the blocks; equal hashes must mean equal sequences."""
        size, tokens, parent = event["block_size"], event["token_ids"], event["parent_block_hash"]
        if not tokens:  # in host memory: known from the device
            assert set(event["block_hashes"]) <= self.tokens.keys()
            return
        assert len(tokens) == size * len(event["block_hashes"])
        keys = event.get("extra_keys")
        before, extra = ((), keys and keys[0]) if parent is None else self.tokens[parent]
        for i, block in enumerate(event["block_hashes"]):
            before = (*before, *tokens[i * size : (i + 1) * size])
            assert self.tokens.setdefault(block, (before, extra)) == (before, extra)
        assert keys is None or (len(keys) == len(event["block_hashes"]) and not any(keys[1:]))


def named(event: list[Any]) -> dict[str, Any]:
    """An event as an array, as one with names."""
    name, *values = event
    fields = ARRAY_FIELDS[name].split()
    assert len(values) == len(fields)
    found = {key: value for key, value in zip(fields, values, strict=True) if value is not None}
    return {"type": name, "parent_block_hash": None} | found


def short(keys: Iterable[bytes]) -> set[int]:
    """The cache's hashes as events tell them."""
    return {int.from_bytes(key[-8:], "big") for key in keys}
