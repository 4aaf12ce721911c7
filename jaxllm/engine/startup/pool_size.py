"""How many KV pages memory or a flag gives a pool."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.config import EngineConfig
from jaxllm.engine.startup.budget import MemoryBudget
from jaxllm.engine.startup.kv_requirements import KVRequirements
from jaxllm.units import GIB

PAGE_ROUND = 64  # pages; a stable count keeps compiled programs reusable between starts
CPU_POOL_CAP = 4 * GIB  # development machines share their memory with everything else


def pool_pages(config: EngineConfig, budget: MemoryBudget, need: KVRequirements) -> int:
    """Pages of the pool: as many as were asked for, or all that fit. On CPU no more than the
    requests at once can use."""
    if config.num_gpu_blocks_override is not None:
        return max(0, config.num_gpu_blocks_override)
    if config.kv_cache_memory_bytes is not None:
        return need.pages_in(max(0, config.kv_cache_memory_bytes))
    fitting = need.pages_in(max(0, budget.for_pages))
    if not budget.shared:
        return fitting // PAGE_ROUND * PAGE_ROUND
    cap = max(need.pages_in(CPU_POOL_CAP), need.pages_per_request)
    useful = -(-need.max_num_seqs * need.pages_per_request // PAGE_ROUND) * PAGE_ROUND
    return min(fitting, cap, useful)


def smallest_pool(config: EngineConfig, budget: MemoryBudget, need: KVRequirements) -> int:
    """Pages of the smallest pool that holds one longest request."""
    rounding = 1 if budget.shared or size_flag(config) is not None else PAGE_ROUND
    return -(-need.pages_per_request // rounding) * rounding


def fitting_length(config: EngineConfig, budget: MemoryBudget, need: KVRequirements) -> int:
    """The longest `max_model_len` whose pages fit, at most the one that `need` has."""
    pages = pool_pages(config, budget, need)
    if pages >= need.pages_per_request:
        return need.max_model_len
    if len(need.groups) == 1:
        return min(need.max_model_len, pages * need.page_size)
    # In pages: what other groups hold of a request depends on its length
    low = 0
    high = need.pages_per_request
    while high - low > 1:
        middle = (low + high) // 2
        shorter = replace(need, max_model_len=middle * need.page_size)
        if pool_pages(config, budget, shorter) >= shorter.pages_per_request:
            low = middle
        else:
            high = middle
    return low * need.page_size


def size_flag(config: EngineConfig) -> str | None:
    """The flag that sets the pool's size, with its value; None when memory does."""
    if config.num_gpu_blocks_override is not None:
        return f"--num-gpu-blocks-override {config.num_gpu_blocks_override}"
    size = config.kv_cache_memory_bytes
    return None if size is None else f"--kv-cache-memory-bytes {size}"
