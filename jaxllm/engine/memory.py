"""How many KV pages fit: the device's memory less weights, less what the largest step needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import psutil

from jaxllm.config import ConfigError, EngineConfig

GIB = 2**30
PAGE_ROUND = 256  # pages; a stable count keeps compiled programs reusable between starts
CPU_POOL_CAP = 4 * GIB  # development machines share their memory with everything else


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per device: what may be used, what weights and the largest step take, what the pages get."""

    total: int
    weights: int
    workspace: int
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
    """Bytes this process may use on a device: the accelerator client's limit, or a share of the host's free memory on CPU."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return int(psutil.virtual_memory().available * config.gpu_memory_utilization)


def workspace_bytes(hf: dict, tokens: int, rows: int, itemsize: int, shards: int) -> int:
    """Temporaries of the largest step: activations of `tokens` tokens and float32 logits of `rows` rows, with slack for the compiler."""
    width = hf["hidden_size"] * 6 + (hf["intermediate_size"] * 4) // shards
    return tokens * width * itemsize + rows * hf["vocab_size"] * 4 * 4 + (GIB // 4 if jax.default_backend() != "cpu" else 0)


def plan_memory(config: EngineConfig, total: int, weights: int, workspace: int, need: Need) -> MemoryPlan:
    """Pages for the pool. Raises ConfigError with needed and available GiB, the longest length that fits, and the flags that help."""
    left = total - weights - workspace
    useful = need.max_num_seqs * need.pages_per_request
    if config.num_gpu_blocks_override is not None:
        pages = config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        pages = config.kv_cache_memory_bytes // need.page_bytes
    else:
        cap = max(CPU_POOL_CAP, need.pages_per_request * need.page_bytes) if jax.default_backend() == "cpu" else left
        pages = min(left, cap) // need.page_bytes
        pages = min(pages, _round_up(useful, PAGE_ROUND)) if jax.default_backend() == "cpu" else pages // PAGE_ROUND * PAGE_ROUND
    if pages < need.pages_per_request or left <= 0:
        raise ConfigError(_too_small(total, weights, workspace, max(0, pages), need))
    return MemoryPlan(total, weights, workspace, need.page_bytes, int(pages))


def fitting_length(config: EngineConfig, total: int, weights: int, workspace: int, need: Need) -> int:
    """The longest `max_model_len` whose pages fit, at most the model's own; for `max_model_len="auto"`."""
    if config.num_gpu_blocks_override is not None:
        pages = config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        pages = config.kv_cache_memory_bytes // need.page_bytes
    else:
        pages = max(0, total - weights - workspace) // need.page_bytes
    return min(need.max_model_len, int(pages) * need.page_size)


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _too_small(total: int, weights: int, workspace: int, pages: int, need: Need) -> str:
    wanted, have = need.pages_per_request * need.page_bytes / GIB, pages * need.page_bytes / GIB
    terms = f"{total / GIB:.2f} GiB usable − {weights / GIB:.2f} weights − {workspace / GIB:.2f} step temporaries"
    return (
        f"to serve one request of max_model_len {need.max_model_len} tokens, {wanted:.2f} GiB of KV cache is needed, but {have:.2f} GiB is "
        f"available ({terms}); the longest that fits is {pages * need.page_size} tokens. Set --max-model-len to at most that (or auto), "
        "raise --gpu-memory-utilization or --kv-cache-memory-bytes, or lower --max-num-batched-tokens"
    )
