"""How many KV pages a pool gets, and what an operator is told where they are too few."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.startup.kv_requirements import KVRequirements
from jaxllm.engine.startup.memory import MemoryBudget, MemoryPlan
from jaxllm.models import ModelSpec
from jaxllm.units import GIB, amount

PAGE_ROUND = 64  # pages; a stable count keeps compiled programs reusable between starts
# One part of it, of what pages may have, is kept beside the expected step: a step that needs more
# than the pool left would have every program made again
MARGIN_SHARE = 250
CPU_POOL_CAP = 4 * GIB  # development machines share their memory with everything else


def first_plan(
    config: EngineConfig,
    budget: MemoryBudget,
    need: KVRequirements,
    expected_workspace: int | None = None,
) -> MemoryPlan:
    """`plan_memory` before any step is compiled.

    A pool of the `expected_workspace`, and a margin, is most often right already. An estimate
    refuses nothing where a step is going to be compiled: `sizing.fit_pool` and
    `sizing.check_largest_step` do.
    """
    if expected_workspace is not None and is_measured(config, budget):
        with contextlib.suppress(ConfigError):  # the step may need less
            expected = replace(budget, workspace=expected_workspace, expected=True)
            margin = max(0, expected.for_pages) // MARGIN_SHARE
            expected = replace(expected, workspace=expected_workspace + margin)
            return plan_memory(config, expected, need)
    least = replace(budget, workspace=0) if _compiles(config, budget) else budget
    return replace(plan_memory(config, least, need), budget=budget)


def plan_memory(config: EngineConfig, budget: MemoryBudget, need: KVRequirements) -> MemoryPlan:
    """Pages for the pool, where `need` is for the longest sequence that was asked for.

    Raises ConfigError with needed and available GiB, the longest length that fits, and the flags
    that help.
    """
    if may_shorten(config):
        need = replace(need, max_model_len=max(1, fitting_length(config, budget, need)))
    pages = pool_pages(config, budget, need)
    if pages and need.bytes_of(pages) > budget.for_pages:
        raise ConfigError(_too_large(config, budget, need, pages))
    if pages < need.pages_per_request:
        raise ConfigError(_too_small(config, budget, need, pages))
    return MemoryPlan(budget, need.max_model_len, pages, need.bytes_of(pages))


def fitting_length(config: EngineConfig, budget: MemoryBudget, need: KVRequirements) -> int:
    """The longest `max_model_len` whose pages fit, at most the one that `need` has."""
    pages = pool_pages(config, budget, need)
    if pages >= need.pages_per_request:
        return need.max_model_len
    if len(need.groups) == 1:
        return min(need.max_model_len, pages * need.page_size)
    # In pages: what other groups hold of a request depends on its length
    low, high = 0, need.pages_per_request
    while high - low > 1:
        middle = (low + high) // 2
        shorter = replace(need, max_model_len=middle * need.page_size)
        fits = pool_pages(config, budget, shorter) >= shorter.pages_per_request
        low, high = (middle, high) if fits else (low, middle)
    return low * need.page_size


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


def is_measured(config: EngineConfig, budget: MemoryBudget) -> bool:
    """Whether the pool gets what a compiled step leaves. Elsewhere the estimate holds, or the size
    that was asked for."""
    return _compiles(config, budget) and _size_flag(config) is None


def _compiles(config: EngineConfig, budget: MemoryBudget) -> bool:
    """Whether steps are compiled before they run, for a device with memory of its own."""
    return not budget.shared and not config.enforce_eager


def may_shorten(config: EngineConfig) -> bool:
    """Whether the longest sequence may become shorter to fit memory."""
    return config.max_model_len in ("auto", -1)


def model_length(config: EngineConfig, spec: ModelSpec) -> int:
    """Tokens of the longest sequence that was asked for."""
    limit, asked = spec.context_length, config.max_model_len
    if asked is None or may_shorten(config):
        return limit
    asked = int(asked)
    if asked < 1:
        raise ConfigError(f"--max-model-len must be at least 1, got {asked}")
    if asked > limit:
        raise ConfigError(
            f"--max-model-len {asked} is longer than the model allows ({limit} tokens); "
            "ask for at most that, or auto"
        )
    return asked


def _size_flag(config: EngineConfig) -> str | None:
    """The flag that sets the pool's size, with its value; None when memory does."""
    if config.num_gpu_blocks_override is not None:
        return f"--num-gpu-blocks-override {config.num_gpu_blocks_override}"
    size = config.kv_cache_memory_bytes
    return None if size is None else f"--kv-cache-memory-bytes {size}"


def _smallest_pool(config: EngineConfig, budget: MemoryBudget, need: KVRequirements) -> int:
    """Pages of the smallest pool that holds one longest request."""
    rounding = 1 if budget.shared or _size_flag(config) is not None else PAGE_ROUND
    return -(-need.pages_per_request // rounding) * rounding


def _too_small(config: EngineConfig, budget: MemoryBudget, need: KVRequirements, pages: int) -> str:
    flag, longest = _size_flag(config), fitting_length(config, budget, need)
    wanted = amount(need.bytes_of(_smallest_pool(config, budget, need)))
    requests = f"one request of max_model_len {need.max_model_len} tokens"
    if may_shorten(config):
        requests = f"requests of up to {need.page_size} tokens"
    given = f"{flag} gives {amount(need.bytes_of(pages), down=True)}" if flag else budget.available
    fits = f"the longest that fits is {longest} tokens" if longest else "no length fits"
    return (
        f"to serve {requests}, {wanted} of KV cache is needed, but {given}; {fits}. "
        f"What helps: {'; or '.join(remedies(config, budget, need))}"
    )


def _too_large(config: EngineConfig, budget: MemoryBudget, need: KVRequirements, pages: int) -> str:
    fitting = need.pages_in(max(0, budget.for_pages))
    largest = (
        f"--num-gpu-blocks-override {fitting}"
        if config.num_gpu_blocks_override is not None
        else f"--kv-cache-memory-bytes {need.bytes_of(fitting)}"
    )
    helps = f"ask for at most {largest}, or leave it out"
    if fitting < need.pages_per_request:
        unset = replace(config, num_gpu_blocks_override=None, kv_cache_memory_bytes=None)
        helps = f"leave it out, with {'; or '.join(remedies(unset, budget, need))}"
    size = amount(need.bytes_of(pages))
    return f"a KV pool of {pages} pages needs {size}, but {budget.available}; {helps}"


def remedies(config: EngineConfig, budget: MemoryBudget, need: KVRequirements) -> list[str]:
    """What alone makes the pool hold one longest request: flags with values, or words where no flag
    helps."""
    size = need.bytes_of(_smallest_pool(config, budget, need))
    deficit, longest = size - budget.for_pages, fitting_length(config, budget, need)
    helps = [f"--max-model-len {longest} (or auto)"] if longest else []
    if _size_flag(config) is not None:
        enough = (
            f"--kv-cache-memory-bytes {size}"
            if config.num_gpu_blocks_override is None
            else f"--num-gpu-blocks-override {need.pages_per_request}"
        )
        helps += [enough] if deficit <= 0 else []
    else:
        helps += _memory_flags(config, budget, need, size)
    helps += _more_devices(config, budget, need)
    return helps or ["a device with more memory, or a smaller model"]


def _memory_flags(
    config: EngineConfig, budget: MemoryBudget, need: KVRequirements, size: int
) -> list[str]:
    """Flags that leave `size` bytes for pages: a larger share of the device, or smaller steps."""
    helps, deficit = list[str](), size - budget.for_pages
    usable = config.gpu_memory_utilization * (budget.usable + deficit) / max(1, budget.usable)
    share = math.ceil(100 * usable) / 100
    if share <= 1:
        helps.append(f"--gpu-memory-utilization {share:.2f}")
    left = budget.workspace - deficit
    tokens = int(need.step_tokens * left / budget.workspace) // 16 * 16 if left > 0 else 0
    if tokens >= need.max_num_seqs:
        helps.append(f"--max-num-batched-tokens {tokens}")
    elif size <= budget.usable - budget.weights - budget.spare - budget.staged:
        helps.append(
            f"lower --max-num-batched-tokens ({need.step_tokens}) "
            f"or --max-num-seqs ({need.max_num_seqs})"
        )
    return helps


def _more_devices(config: EngineConfig, budget: MemoryBudget, need: KVRequirements) -> list[str]:
    """The least tensor parallelism that helps. Devices that share their memory do not help."""
    for times in () if budget.shared else need.splits:
        split = replace(budget, weights=-(-budget.weights // times))
        share = replace(
            need,
            page_bytes=tuple(-(-size // times) for size in need.page_bytes),
        )
        pages = pool_pages(config, split, share)
        if share.pages_per_request <= pages and share.bytes_of(pages) <= split.for_pages:
            size = times * config.tensor_parallel_size
            return [f"--tensor-parallel-size {size}, over {times} times the devices"]
    return []


def splits(spec: ModelSpec, shards: int) -> tuple[int, ...]:
    """Over how many times the devices weights and pages divide evenly, without a KV head that is
    kept twice."""

    def even(times: int) -> bool:
        try:
            return all(
                spec.heads(times * shards, layer).kv_stored == spec.heads(shards, layer).kv_stored
                for layer in spec.attention_layers
            )
        except ConfigError:
            return False

    return tuple(filter(even, (2, 4, 8)))
