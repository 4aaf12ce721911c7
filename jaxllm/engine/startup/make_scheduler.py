"""The scheduler of an engine: jaxllm's own, or an operator's subclass."""

from __future__ import annotations

import importlib

from jaxllm.cache.backends import tile_tokens
from jaxllm.cache.host import HostTier
from jaxllm.cache.pool import Lifetime, PagePool
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.config import ConfigError, EngineConfig, Resolved
from jaxllm.engine.runtime.pooling_runner import PoolingRunner
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.scheduling.chunk_planner import Taper, prefill_budget, seconds_per_token
from jaxllm.engine.scheduling.kv_offload import OffloadManager
from jaxllm.engine.scheduling.plan import Limits
from jaxllm.engine.scheduling.policy import POLICIES
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.startup.host_memory import PLAN_LOADS
from jaxllm.engine.startup.model_digest import prefix_root
from jaxllm.kv_transfer.settings import KVTransferSettings

# Tokens of a step whose pages are sent: larger steps take as long for each token, and smaller ones
# would take more to compute than they save to send
SHORTEST_STEP = 512
# Tokens whose pages a step takes in at most: each page costs the host time, for which running
# streams wait. A prefill server computes fewer meanwhile
FETCHED_TOKENS = 512


def scheduler_class(name: str | None) -> type[Scheduler]:
    """The subclass of `Scheduler` that `--scheduler-cls module:Class` names, by default `Scheduler`
    itself. Raises ConfigError."""
    if name is None:
        return Scheduler
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    try:
        chosen = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--scheduler-cls {name:.80} cannot be loaded: {error}; name it as module:Class"
        ) from None
    if not (isinstance(chosen, type) and issubclass(chosen, Scheduler)):
        raise ConfigError(
            f"--scheduler-cls {name:.80} must be a subclass of "
            "jaxllm.engine.scheduling.scheduler.Scheduler"
        )
    return chosen


def make_scheduler(
    scheduler_type: type[Scheduler],
    config: EngineConfig,
    resolved: Resolved,
    runner: Runner | PoolingRunner,
) -> Scheduler:
    """A scheduler for what was decided and measured at start."""
    shares = resolved.enable_prefix_caching
    pools = [
        make_pool(config, resolved, window, pages)
        for window, pages in zip(resolved.windows, resolved.group_pages, strict=True)
    ]
    prefix = pools[0].index
    limits = Limits(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        groups=resolved.pipeline_parallel_size,
    )
    scheduler = scheduler_type(
        limits, pools, runner.shapes.buckets, POLICIES[resolved.scheduling_policy]
    )
    transfer = KVTransferSettings.read(config.kv_transfer_config)
    if prefix is not None and resolved.host_pages:
        offload = OffloadManager(
            HostTier(resolved.host_pages, resolved.host_cached_pages),
            prefix,
            _most_fetches(resolved, transfer),
        )
        offload.link = runner.link or offload.link
        offload.fetches_done = runner.fetches_done
        offload.compute_seconds = resolved.page_size * seconds_per_token(runner.seconds)
        scheduler.attach_offload(
            offload, swap_preempted=resolved.preemption_mode == "swap", share_prefixes=shares
        )
    if resolved.pooling is not None:
        scheduler.chunk_planner.whole_prompts = not resolved.pooling.takes_chunks
    if resolved.prefix_refusal is not None:
        scheduler.set_apart()
    if resolved.batch_invariant:
        scheduler.set_batch_invariant()
    # A batch-invariant engine has one shape for prompts, to which shorter steps would be padded
    if transfer is not None and not transfer.fetches and not resolved.batch_invariant:
        scheduler.chunk_planner.taper = Taper(SHORTEST_STEP)
    if config.max_stall_ms is not None:
        scheduler.chunk_planner.budget = prefill_budget(runner.seconds, config.max_stall_ms / 1e3)
    return scheduler


def _most_fetches(resolved: Resolved, transfer: KVTransferSettings | None) -> int:
    """Pages that a plan fetches from host memory at most."""
    pages = PLAN_LOADS * resolved.moved_pages
    if transfer is None or not transfer.fetches:
        return pages
    return min(pages, max(1, FETCHED_TOKENS // resolved.page_size))


def make_pool(config: EngineConfig, resolved: Resolved, window: int | None, pages: int) -> PagePool:
    """The pages of one cache group. Indexes of all groups have the same hashes."""
    indexed = resolved.enable_prefix_caching or resolved.host_pages > 0
    index = None
    if indexed:
        index = PrefixIndex(resolved.page_size, prefix_root(config, resolved))
    lifetime = Lifetime(
        window, resolved.max_num_batched_tokens, tile_tokens(resolved.attention_backend)
    )
    return PagePool(pages, resolved.page_size, index, lifetime)
