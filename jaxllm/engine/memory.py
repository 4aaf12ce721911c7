"""How many KV pages fit: the device's memory less weights, less buffers that stay, less what the largest step needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.buckets import Buckets
from jaxllm.sampling.process import terms_bytes

GIB = 2**30
PAGE_ROUND = 64  # pages; a stable count keeps compiled programs reusable between starts
LOGIT_COPIES = 10  # what XLA's memory analysis finds for the sampler with log-probabilities, and one to spare
SPARE = 512 * 2**20  # of an accelerator: slot state, programs' constants, and what its allocator loses between buffers
CPU_POOL_CAP = 4 * GIB  # development machines share their memory with everything else


@dataclass(frozen=True)
class Room:
    """Bytes on one device: what may be used, and what takes of it: weights, the largest step while it runs (`workspace`), buffers that
    stay (`resident`), and what is left free (`spare`). `shared` memory is the host's own."""

    usable: int
    weights: int
    workspace: int
    shared: bool
    resident: int = 0
    spare: int = 0

    @property
    def left(self) -> int:
        """Bytes for KV pages; negative when not even the weights fit."""
        return self.usable - self.weights - self.workspace - self.resident - self.spare

    @property
    def terms(self) -> str:
        """The sum, for messages."""
        taken = {"weights": self.weights, "for the largest step": self.workspace, "for sampling": self.resident, "spare": self.spare}
        return f"{self.usable / GIB:.2f} GiB usable" + "".join(f" − {size / GIB:.2f} {name}" for name, size in taken.items() if size)


@dataclass(frozen=True)
class MemoryPlan:
    """The room on one device and the pages it gets."""

    room: Room
    page: int
    num_pages: int

    @property
    def kv(self) -> int:
        """Bytes of all KV pages on one device."""
        return self.num_pages * self.page


@dataclass(frozen=True)
class Need:
    """What the pool must serve: bytes per page and device, tokens per page, requests at once, their longest length."""

    page_bytes: int
    page_size: int
    max_num_seqs: int
    max_model_len: int

    @property
    def pages_per_request(self) -> int:
        return -(-self.max_model_len // self.page_size)


def usable_bytes(config: EngineConfig, device: Any) -> int:
    """Bytes that are free for this engine on a device: of the accelerator client's limit, or a share of the host's free memory on CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return int(psutil.virtual_memory().available * config.gpu_memory_utilization)


def workspace_bytes(hf: dict, tokens: int, rows: int, itemsize: int, shards: int) -> int:
    """Reserve for the largest step: activations of `tokens` tokens and what sampling holds of the float32 logits of `rows` rows."""
    width = hf["hidden_size"] * 6 + (hf["intermediate_size"] * 4) // shards
    return tokens * width * itemsize + rows * hf["vocab_size"] * 4 * LOGIT_COPIES


def resident_bytes(logit_rows: Sequence[int], slots: int, vocab_size: int, shards: int) -> int:
    """What stays on one device for sampling: float32 logits, the model's and those that `process` makes of them, for each row count, and
    16-bit counts of each slot's tokens, where devices share a vocabulary that divides; and what requests ask of `process`."""
    split = sum(logit_rows) * vocab_size * 4 * 2 + (slots + 1) * vocab_size * 2
    return split // (shards if vocab_size % shards == 0 else 1) + terms_bytes(slots, vocab_size)


def states_shape(hf: dict, buckets: Buckets) -> tuple[int, int]:
    """Of the hidden states that extends leave: every chunk token of the largest step."""
    return buckets.max_tokens, hf["hidden_size"]


def plan_memory(config: EngineConfig, room: Room, need: Need) -> MemoryPlan:
    """Pages for the pool. Raises ConfigError with needed and available GiB, the longest length that fits, and the flags that help."""
    pages = pool_pages(config, room, need)
    if pages * need.page_bytes > room.left:
        raise ConfigError(
            f"a KV pool of {pages} pages needs {pages * need.page_bytes / GIB:.2f} GiB, but {max(0, room.left) / GIB:.2f} GiB is available "
            f"({room.terms}); lower --num-gpu-blocks-override or --kv-cache-memory-bytes, or leave them out"
        )
    if pages < need.pages_per_request:
        raise ConfigError(_too_small(room, pages, need))
    return MemoryPlan(room, need.page_bytes, pages)


def fitting_length(config: EngineConfig, room: Room, need: Need) -> int:
    """The longest `max_model_len` whose pages fit, at most the model's own; for `max_model_len="auto"`."""
    return min(need.max_model_len, pool_pages(config, room, need) * need.page_size)


def pool_pages(config: EngineConfig, room: Room, need: Need) -> int:
    """How many pages the pool gets: as asked, or all that fit. On CPU no more than the requests at once can use."""
    if config.num_gpu_blocks_override is not None:
        return max(0, config.num_gpu_blocks_override)
    if config.kv_cache_memory_bytes is not None:
        return max(0, config.kv_cache_memory_bytes) // need.page_bytes
    fitting = max(0, room.left) // need.page_bytes
    if not room.shared:
        return fitting // PAGE_ROUND * PAGE_ROUND
    cap = max(CPU_POOL_CAP // need.page_bytes, need.pages_per_request)
    useful = -(-need.max_num_seqs * need.pages_per_request // PAGE_ROUND) * PAGE_ROUND
    return min(fitting, cap, useful)


def _too_small(room: Room, pages: int, need: Need) -> str:
    wanted, have = need.pages_per_request * need.page_bytes / GIB, pages * need.page_bytes / GIB
    return (
        f"to serve one request of max_model_len {need.max_model_len} tokens, {wanted:.2f} GiB of KV cache is needed, but {have:.2f} GiB is "
        f"available ({room.terms}); the longest that fits is {pages * need.page_size} tokens. Set --max-model-len to at most that "
        "(or auto), raise --gpu-memory-utilization or --kv-cache-memory-bytes, or lower --max-num-batched-tokens"
    )
