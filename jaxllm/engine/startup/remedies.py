"""What an operator is told where memory is too small, or less than was asked for. Every value that
is named as a remedy has been tried: the same sizing was run with it, and it fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.startup.budget import MemoryBudget
from jaxllm.engine.startup.kv_requirements import (
    KVRequirements,
    fitting_length,
    pool_pages,
    size_flag,
    smallest_pool,
)
from jaxllm.engine.startup.limits import may_shorten
from jaxllm.units import GIB, amount

# The budget of a device with steps of at most so many tokens, and so many requests at once
type Smaller = Callable[[int, int], MemoryBudget]

NOTHING = "a device with more memory, or a smaller model"
TRIES = 3  # sizes of a step that are tried for a remedy; each may be a program to compile
LEAST_SHARE = 1 / 8  # of a step's tokens that is tried first
TOKEN_ROUND = 16  # tokens that a step's limit is named in


def too_small(
    config: EngineConfig,
    budget: MemoryBudget,
    need: KVRequirements,
    pages: int,
    smaller: Smaller | None,
) -> str:
    """The error of a pool of `pages` that does not hold one longest request."""
    flag = size_flag(config)
    longest = fitting_length(config, budget, need)
    wanted = amount(need.bytes_of(smallest_pool(config, budget, need)))
    requests = f"one request of max_model_len {need.max_model_len} tokens"
    if may_shorten(config):
        requests = f"requests of up to {need.page_size} tokens"
    size = amount(need.bytes_of(pages), down=True)
    if flag:
        supply = f"{flag} gives {size}"
    else:
        supply = budget.available
    fits = "no length fits"
    if longest:
        fits = f"the longest that fits is {longest} tokens"
    return (
        f"to serve {requests}, {wanted} of KV cache is needed, but {supply}; {fits}. "
        f"What helps: {'; or '.join(remedies(config, budget, need, smaller))}"
    )


def too_large(
    config: EngineConfig,
    budget: MemoryBudget,
    need: KVRequirements,
    pages: int,
    smaller: Smaller | None,
) -> str:
    """The error of a pool of `pages` that was asked for and has no room, or of pages without bytes
    where not even the rest has room."""
    if not need.group_bytes:
        unset = replace(config, num_gpu_blocks_override=None, kv_cache_memory_bytes=None)
        helps = "; or ".join(remedies(unset, budget, need, smaller))
        return f"the model has no room: {budget.available}. What helps: {helps}"
    fitting = need.pages_in(max(0, budget.for_pages))
    if config.num_gpu_blocks_override is not None:
        largest = f"--num-gpu-blocks-override {fitting}"
    else:
        largest = f"--kv-cache-memory-bytes {need.bytes_of(fitting)}"
    helps = f"ask for at most {largest}, or leave it out"
    if fitting < need.pages_per_request:
        unset = replace(config, num_gpu_blocks_override=None, kv_cache_memory_bytes=None)
        helps = f"leave it out, with {'; or '.join(remedies(unset, budget, need, smaller))}"
    size = amount(need.bytes_of(pages))
    return f"a KV pool of {pages} pages needs {size}, but {budget.available}; {helps}"


def crowded(
    config: EngineConfig,
    budget: MemoryBudget,
    need: KVRequirements,
    pages: int,
    smaller: Smaller,
) -> str:
    """The error of a largest step that has no room beside a pool of `pages`; its need is the
    budget's workspace."""
    size = need.bytes_of(pages)
    rest = replace(budget, workspace=0, spare=0)
    left = rest.for_pages - size
    helps = [
        f"--max-num-batched-tokens {tokens}{others}"
        for tokens, others in _smaller_steps(
            need, left / budget.workspace, smaller, lambda trial: _fits_beside(trial, size)
        )
    ]
    if need.group_bytes:  # other pages leave a step no more room
        fitting = need.pages_in(max(0, rest.for_pages - budget.workspace))
        if fitting >= need.pages_per_request:
            helps.append(
                f"--num-gpu-blocks-override {fitting} "
                f"(--kv-cache-memory-bytes {need.bytes_of(fitting)})"
            )
    unset = replace(config, num_gpu_blocks_override=None, kv_cache_memory_bytes=None)
    flag = size_flag(config)
    if flag is not None and _holds_one(unset, budget, need):
        helps.append(f"leave out {flag}")
    return (
        f"the largest step needs {budget.workspace / GIB:.2f} GiB, but {left / GIB:.2f} GiB is "
        f"left for it ({rest.breakdown}, {size / GIB:.2f} for KV pages); "
        f"what helps: {'; or '.join(helps or [NOTHING])}"
    )


def remedies(
    config: EngineConfig, budget: MemoryBudget, need: KVRequirements, smaller: Smaller | None
) -> list[str]:
    """What alone makes the pool hold one longest request: flags with values, or words where no flag
    helps."""
    size = need.bytes_of(smallest_pool(config, budget, need))
    deficit = size - budget.for_pages
    longest = fitting_length(config, budget, need)
    helps: list[str] = []
    if 0 < longest < need.max_model_len:
        helps.append(f"--max-model-len {longest} (or auto)")
    if size_flag(config) is not None:
        if config.num_gpu_blocks_override is None:
            enough = f"--kv-cache-memory-bytes {size}"
        else:
            enough = f"--num-gpu-blocks-override {need.pages_per_request}"
        helps += [enough] if deficit <= 0 else []
    else:
        helps += _larger_share(config, budget, need, deficit)
        share = (budget.workspace - deficit) / max(1, budget.workspace)
        helps += [
            f"--max-num-batched-tokens {tokens}{others}"
            for tokens, others in _smaller_steps(
                need, share, smaller, lambda trial: _holds_one(config, trial, need)
            )
        ]
    helps += _more_devices(config, budget, need)
    return helps or [NOTHING]


def _larger_share(
    config: EngineConfig, budget: MemoryBudget, need: KVRequirements, deficit: int
) -> list[str]:
    """The least share of the device that leaves `deficit` bytes more for pages."""
    used = config.gpu_memory_utilization
    share = math.ceil(100 * used * (budget.usable + deficit) / max(1, budget.usable)) / 100
    larger = replace(budget, usable=int(budget.usable * share / used))
    if share > 1 or not _holds_one(config, larger, need):
        return []
    return [f"--gpu-memory-utilization {share:.2f}"]


def _smaller_steps(
    need: KVRequirements,
    share: float,
    smaller: Smaller | None,
    fits: Callable[[MemoryBudget], bool],
) -> Iterator[tuple[int, str]]:
    """The largest of a few smaller limits of a step's tokens that fits, with what else must be
    lowered for it; none where none of these does. There is memory for this `share` of the step."""
    if smaller is None:
        return
    for tokens, seqs in _step_sizes(need, share):
        try:
            budget = smaller(tokens, seqs)
        except ConfigError:
            continue  # the model takes no such steps
        if fits(budget):
            yield tokens, f" with --max-num-seqs {seqs}" if seqs < need.max_num_seqs else ""
            return


def _step_sizes(need: KVRequirements, share: float) -> Iterator[tuple[int, int]]:
    """Limits of tokens and requests to try, from large to small: first as many requests as were
    asked for."""
    tokens = int(need.step_tokens * max(LEAST_SHARE, share))
    seqs = need.max_num_seqs
    for _ in range(TRIES):
        tokens = tokens // TOKEN_ROUND * TOKEN_ROUND
        if tokens < seqs:
            break
        if tokens < need.step_tokens:
            yield tokens, seqs
        tokens //= 2
    fewer = max(1, seqs // 8)
    if fewer < seqs:
        yield max(fewer, TOKEN_ROUND), fewer


def _fits_beside(budget: MemoryBudget, pages: int) -> bool:
    """Whether a step of this budget has room beside `pages` bytes of a pool."""
    return replace(budget, spare=0).for_pages >= pages


def _holds_one(config: EngineConfig, budget: MemoryBudget, need: KVRequirements) -> bool:
    """Whether the pool holds one longest request."""
    pages = pool_pages(config, budget, need)
    return need.pages_per_request <= pages and need.bytes_of(pages) <= budget.for_pages


def _more_devices(config: EngineConfig, budget: MemoryBudget, need: KVRequirements) -> list[str]:
    """The least tensor parallelism that helps. Devices that share their memory do not help."""
    for times in () if budget.shared else need.splits:
        split = replace(budget, weights=-(-budget.weights // times))
        share = replace(
            need,
            page_bytes=tuple(-(-size // times) for size in need.page_bytes),
        )
        if _holds_one(config, split, share):
            size = times * config.tensor_parallel_size
            return [f"--tensor-parallel-size {size}, over {times} times the devices"]
    return []
