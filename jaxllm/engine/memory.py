"""How many KV pages fit: the device's memory less weights, less buffers that stay, less what the largest step needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from jaxllm.cache.pool import Kind
from jaxllm.config import SWAP_SPACE, ConfigError, EngineConfig
from jaxllm.engine.buckets import Buckets
from jaxllm.sampling.process import terms_bytes

GIB = 2**30
PAGE_ROUND = 64  # pages; a stable count keeps compiled programs reusable between starts
LOGIT_COPIES = 10  # XLA's memory analysis finds eight for a draw with filters in plain JAX; until a step is compiled, two to spare
SPARE = 512 * 2**20  # of an accelerator: slot state, programs' constants, and what its allocator loses between buffers
MOVED = 32 * 2**20  # bytes that one program moves between the pool and host memory
# Programs' worth of such pages on the device at once: two on their way out and two on their way in, two that the next plan puts, and two
# more that the programs read or have made.
STAGED = 8
MOST_MOVED = 32  # pages
CPU_POOL_CAP = 4 * GIB  # development machines share their memory with everything else


@dataclass(frozen=True)
class Room:
    """Bytes on one device: what may be used, and what takes of it: weights, the largest step while it runs (`workspace`), buffers that
    stay (`resident`), what is left free (`spare`), and pages on their way to or from the host (`staged`). `shared` memory is the host's
    own."""

    usable: int
    weights: int
    workspace: int
    shared: bool
    resident: int = 0
    spare: int = 0
    staged: int = 0

    @property
    def left(self) -> int:
        """Bytes for KV pages; negative when not even the weights fit."""
        return self.usable - self.weights - self.workspace - self.resident - self.spare - self.staged

    @property
    def terms(self) -> str:
        """The sum, for messages."""
        taken = {"weights": self.weights, "for the largest step": self.workspace, "for sampling": self.resident, "spare": self.spare}
        taken["for pages on their way to or from the host"] = self.staged
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
    """What the pool must serve: bytes per page and device, tokens per page, requests at once, their longest length, tokens a step, and of
    layers with a window how many tokens it has and how many keys a kernel reads at once."""

    page_bytes: int
    page_size: int
    max_num_seqs: int
    max_model_len: int
    step_tokens: int = 0  # of the largest step
    window: int | None = None
    tile: int = 1

    @property
    def pages_per_request(self) -> int:
        """Pages that the longest request holds at once."""
        return Kind(self.window, self.step_tokens, self.tile).most(self.max_model_len, self.page_size)


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
    if pages and pages * need.page_bytes > room.left:
        raise ConfigError(oversized(config, room, need, pages))
    if pages < need.pages_per_request:
        raise ConfigError(_too_small(config, room, pages, need))
    return MemoryPlan(room, need.page_bytes, pages)


def fitting_length(config: EngineConfig, room: Room, need: Need) -> int:
    """The longest `max_model_len` whose pages fit, at most the model's own; for `max_model_len="auto"`."""
    pages = pool_pages(config, room, need)
    return need.max_model_len if pages >= need.pages_per_request else min(need.max_model_len, pages * need.page_size)


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


@dataclass(frozen=True)
class HostPlan:
    """Pages of host memory for what the pool has no room for: in all, those for cached prefixes, and how many move at once."""

    pages: int = 0
    cached: int = 0
    moved: int = 0

    @property
    def staged(self) -> int:
        """Pages on the device that are on their way out or in, at most."""
        return STAGED * self.moved


def plan_host(config: EngineConfig, page: int, shards: int, caching: bool) -> HostPlan:
    """Host memory for pages of `page` bytes on each of `shards` devices. Raises ConfigError when there is less than was asked for."""
    swap = (SWAP_SPACE if config.swap_space is None else config.swap_space) if config.preemption_mode == "swap" else 0.0
    cached = int((config.kv_offloading_size or 0) * GIB) // (page * shards) if caching else 0
    pages = int(swap * GIB) // page + cached
    free = psutil.virtual_memory().available
    if pages * page * shards > free:
        raise ConfigError(
            f"pages in host memory need {pages * page * shards / GIB:.2f} GiB, but {free / GIB:.2f} GiB is available; "
            "lower --swap-space (per device) or --kv-offloading-size"
        )
    if (swap or (config.kv_offloading_size and caching)) and not pages:
        raise ConfigError(
            f"a KV page of {page * shards / GIB:.4f} GiB does not fit the host memory asked for; raise --swap-space or --kv-offloading-size"
        )
    moved = max(1, min(MOST_MOVED, MOVED // page)) if pages else 0
    return HostPlan(pages, cached, 1 << (moved.bit_length() - 1) if moved else 0)


def _too_small(config: EngineConfig, room: Room, pages: int, need: Need) -> str:
    wanted, have = need.pages_per_request * need.page_bytes / GIB, pages * need.page_bytes / GIB
    helps = "; or ".join(remedies(config, room, need, pages))
    return (
        f"to serve one request of max_model_len {need.max_model_len} tokens, {wanted:.2f} GiB of KV cache is needed, but {have:.2f} GiB is "
        f"available ({room.terms}); the longest that fits is {pages * need.page_size} tokens. What helps: {helps}"
    )


def remedies(config: EngineConfig, room: Room, need: Need, pages: int) -> list[str]:
    """Flags with values, each of which alone gives a pool of `pages` pages the room for one longest request."""
    whole = need.pages_per_request
    asked = config.num_gpu_blocks_override is not None or config.kv_cache_memory_bytes is not None
    if not room.shared and not asked:
        whole = -(-whole // PAGE_ROUND) * PAGE_ROUND
    short = whole * need.page_bytes - max(0, room.left)
    helps = [f"--max-model-len {pages * need.page_size} (or auto)"] if pages else []
    if asked and short <= 0:
        by_count = config.num_gpu_blocks_override is not None
        helps.append(f"--num-gpu-blocks-override {whole}" if by_count else f"--kv-cache-memory-bytes {whole * need.page_bytes}")
    if short > 0:
        deficit = whole * need.page_bytes - room.left
        share = math.ceil(100 * config.gpu_memory_utilization * (room.usable + deficit) / room.usable) / 100
        if share <= 1:
            helps.append(f"--gpu-memory-utilization {share:.2f}")
        tokens = int(need.step_tokens * (room.workspace - deficit) / room.workspace) // 16 * 16 if room.workspace > deficit else 0
        if tokens >= need.max_num_seqs:
            helps.append(f"--max-num-batched-tokens {tokens}")
    helps.append(f"--tensor-parallel-size {2 * config.tensor_parallel_size}, over twice the devices")
    return helps


def oversized(config: EngineConfig, room: Room, need: Need, pages: int) -> str:
    """Why a pool of the size that was asked for cannot be."""
    fitting = max(0, room.left) // need.page_bytes
    by_count = config.num_gpu_blocks_override is not None
    most = f"--num-gpu-blocks-override {fitting}" if by_count else f"--kv-cache-memory-bytes {fitting * need.page_bytes}"
    return (
        f"a KV pool of {pages} pages needs {pages * need.page_bytes / GIB:.2f} GiB, but {max(0, room.left) / GIB:.2f} GiB is available "
        f"({room.terms}); ask for at most {most}, or leave it out"
    )
