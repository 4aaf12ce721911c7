"""What the pools of KV pages must serve, how many pages that takes, and how many there are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from jaxllm.cache.groups import CacheGroup, cache_groups, effective_window, merged
from jaxllm.cache.layer import AttentionCache, PagedKV, RecurrentState
from jaxllm.cache.pool import Lifetime
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.startup.budget import MemoryBudget
from jaxllm.models import ModelSpec
from jaxllm.units import GIB

PAGE_ROUND = 64  # pages; a stable count keeps compiled programs reusable between starts
CPU_POOL_CAP = 4 * GIB  # development machines share their memory with everything else
# Of a model whose layers are all alike; the heads decide nothing here
ALIKE = (CacheGroup(PagedKV(1, 1, 1), (0,)),)


@dataclass(frozen=True)
class KVRequirements:
    """What the pools must serve.

    Each cache group has a pool of its own. Page counts without a name are those of the first group.
    The other groups are sized so that all run out together when every request has the longest
    length. Beyond one such request they get what short requests use at once, whose windows are as
    large as those of long ones: up to a third of the bytes.

    Attributes:
        page_bytes: of a page of each group, on one device.
        page_size: tokens of a page.
        max_num_seqs: requests at once.
        max_model_len: tokens of the longest request.
        step_tokens: tokens of the largest step.
        groups: the cache groups that have pages.
        tile: keys that a kernel reads at once.
        splits: over how many times the devices weights and pages divide evenly.
    """

    page_bytes: tuple[int, ...]
    page_size: int
    max_num_seqs: int
    max_model_len: int
    step_tokens: int = 0
    groups: tuple[CacheGroup, ...] = ALIKE
    tile: int = 1
    splits: tuple[int, ...] = ()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens of each group's window; None keeps all."""
        return tuple(group.window for group in self.groups)

    @property
    def group_bytes(self) -> int:
        """Bytes on one device of a page of every group."""
        return sum(self.page_bytes)

    @property
    def pages_per_request(self) -> int:
        """Pages that the longest request holds at once."""
        return self.group_pages_per_request[0]

    @property
    def group_pages_per_request(self) -> tuple[int, ...]:
        """The same for each cache group."""
        lives = (Lifetime(window, self.step_tokens, self.tile) for window in self.windows)
        return tuple(life.max_resident(self.max_model_len, self.page_size) for life in lives)

    def group_pages(self, pages: int) -> tuple[int, ...]:
        """Pages of each group where the first one has `pages`."""
        first, *others = self.group_pages_per_request
        # Bytes for each other group
        beyond = max(0, pages - first) * self.page_bytes[0] // (2 * max(1, len(others)))
        counts = [pages]
        for window, longest, size in zip(
            self.windows[1:], others, self.page_bytes[1:], strict=True
        ):
            lifetime = Lifetime(window, tile=self.tile)
            decoding = min(longest, lifetime.decode_bound(self.page_size) or longest)
            # At once, since one prompt at a time is computed in part
            used = min(pages, (self.max_num_seqs - 1) * decoding + longest)
            counts.append(max(-(-pages * longest // first), min(used, longest + beyond // size)))
        return tuple(counts)

    def at_length(self, length: int) -> KVRequirements:
        """The same where the longest sequence has `length` tokens: groups whose windows are no
        shorter become one, if their pages are alike. Their pages are as many."""
        groups, members = merged(self.groups, length)
        sizes = (sum(self.page_bytes[number] for number in numbers) for numbers in members)
        return replace(self, max_model_len=length, groups=groups, page_bytes=tuple(sizes))

    def bytes_of(self, pages: int) -> int:
        """Bytes on one device of `pages` and the other groups' pages."""
        counts = self.group_pages(pages)
        return sum(count * size for count, size in zip(counts, self.page_bytes, strict=True))

    def pages_in(self, size: int) -> int:
        """The most pages whose bytes, with those of the other groups, are at most `size`. Not for
        pages without bytes."""
        first, *others = self.page_bytes
        if not others:
            return size // first
        return bisect_right(range(size // first + 1), size, key=self.bytes_of) - 1


def model_groups(spec: ModelSpec, length: int, keeps_all: bool) -> tuple[CacheGroup, ...]:
    """The cache groups of a model that serves sequences of up to `length` tokens, those with pages
    first. A model that caches nothing has one without layers.

    Args:
        keeps_all: no page is released behind a window, since host memory knows prefixes from their
            first page on.
    """
    windows = [None if keeps_all else effective_window(window, length) for window in spec.windows]
    groups = cache_groups(spec.layers, windows)
    if spec.caches and groups[0].spec.has_pages:
        return groups
    return (CacheGroup(ALIKE[0].spec, ()), *(groups if spec.caches else ()))


def page_sizes(
    groups: Sequence[CacheGroup],
    stages: Iterable[range],
    layer_bytes: Callable[[AttentionCache], int],
) -> tuple[int, ...]:
    """Bytes of a page of each group that has pages, where most of the group's layers lie together;
    `stages` are the layers of each stage, and `layer_bytes` gives the bytes of a page of one."""
    most = [max(len(group.among(stage)) for stage in stages) for group in groups]
    return tuple(
        count * layer_bytes(group.spec)
        for group, count in zip(groups, most, strict=True)
        if not isinstance(group.spec, RecurrentState)
    )


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


def pool_pages(config: EngineConfig, budget: MemoryBudget, need: KVRequirements) -> int:
    """Pages of the pool: as many as were asked for, or all that fit. On CPU no more than the
    requests at once can use."""
    if config.num_gpu_blocks_override is not None:
        return max(0, config.num_gpu_blocks_override)
    if not need.group_bytes:  # pages count tokens alone: no layer keeps anything in them
        return need.max_num_seqs * need.pages_per_request
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
    if budget.shared or size_flag(config) is not None:
        rounding = 1
    else:
        rounding = PAGE_ROUND
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
    if size is None:
        return None
    return f"--kv-cache-memory-bytes {size}"
