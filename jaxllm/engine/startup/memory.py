"""How many KV pages fit: the device's memory less weights, less buffers that stay, less what the
largest step needs."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxllm.cache.pool import CacheGroup
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.startup.host_memory import available_bytes
from jaxllm.models import ModelSpec
from jaxllm.sampling.process import logits_params_bytes
from jaxllm.units import GIB, amount

PAGE_ROUND = 64  # pages; a stable count keeps compiled programs reusable between starts
# XLA's memory analysis finds eight for a draw with filters in plain JAX; until a step is compiled,
# two to spare
LOGIT_COPIES = 10
# Of an accelerator: slot state, programs' constants, and what its allocator loses between buffers
SPARE = 512 * 2**20
CPU_POOL_CAP = 4 * GIB  # development machines share their memory with everything else


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes on one device: what may be used, and what takes of it: weights, the largest step while
    it runs (`workspace`), buffers that stay (`resident`), what is left free (`spare`), and pages on
    their way to or from the host (`staged`). `shared` memory is the host's own. A `likely`
    workspace is one that a compiled step has yet to confirm."""

    usable: int
    weights: int
    workspace: int
    shared: bool
    resident: int = 0
    spare: int = 0
    staged: int = 0
    likely: bool = False

    @property
    def left(self) -> int:
        """Bytes for KV pages; negative when not even the weights fit."""
        return (
            self.usable - self.weights - self.workspace - self.resident - self.spare - self.staged
        )

    @property
    def said(self) -> str:
        """What is left and why, for messages."""
        found = (
            f"{amount(self.left, down=True)} is available"
            if self.left >= 0
            else f"{amount(-self.left)} is lacking for the rest"
        )
        return f"{found} ({self.terms})"

    @property
    def terms(self) -> str:
        """The sum, for messages."""
        taken = {
            "weights": self.weights,
            "for the largest step": self.workspace,
            "for sampling": self.resident,
            "spare": self.spare,
        }
        taken["for pages on their way to or from the host"] = self.staged
        return f"{self.usable / GIB:.2f} GiB usable" + "".join(
            f" − {size / GIB:.2f} {name}" for name, size in taken.items() if size
        )


@dataclass(frozen=True)
class MemoryPlan:
    """The room on one device and the pages it gets: bytes of a page, and how many, of the first
    kind of layers."""

    room: MemoryBudget
    page: int
    num_pages: int
    kv: int  # bytes of all KV pages on one device


@dataclass(frozen=True)
class KVRequirements:
    """What the pools must serve: bytes per page and device, tokens per page, requests at once,
    their longest length, tokens a step, of layers with a window how many tokens it has and how many
    keys a kernel reads at once, bytes per page of the kinds of layers after the first, and over how
    many times the devices weights and pages divide evenly.

    Counts of pages are those of the first kind. The others have so many that all run out together
    when all requests are of the longest length; and beyond one such request as many as short ones
    use at once, who hold windows as long ones do, but little else, up to a third of the bytes.
    """

    page_bytes: int
    page_size: int
    max_num_seqs: int
    max_model_len: int
    step_tokens: int = 0  # of the largest step
    windows: tuple[int | None, ...] = (None,)
    tile: int = 1
    more_bytes: tuple[int, ...] = ()
    splits: tuple[int, ...] = ()

    @property
    def pages_per_request(self) -> int:
        """Pages that the longest request holds at once."""
        return self.held[0]

    @property
    def held(self) -> tuple[int, ...]:
        """The same of each kind of layers."""
        kinds = (CacheGroup(window, self.step_tokens, self.tile) for window in self.windows)
        return tuple(kind.max_resident(self.max_model_len, self.page_size) for kind in kinds)

    def more_pages(self, pages: int) -> tuple[int, ...]:
        """Pages of each kind after the first, when that has so many."""
        first, *others = self.held
        # Bytes for a kind
        beyond = max(0, pages - first) * self.page_bytes // (2 * max(1, len(others)))
        found = []
        for window, held, size in zip(self.windows[1:], others, self.more_bytes, strict=True):
            steady = min(
                held, CacheGroup(window, tile=self.tile).decode_bound(self.page_size) or held
            )
            # At once, since one prompt at a time is computed in part
            used = min(pages, (self.max_num_seqs - 1) * steady + held)
            found.append(max(-(-pages * held // first), min(used, held + beyond // size)))
        return tuple(found)

    def bytes_of(self, pages: int) -> int:
        """Bytes on one device of so many pages and those of the other kinds."""
        more = zip(self.more_pages(pages), self.more_bytes, strict=True)
        return pages * self.page_bytes + sum(count * size for count, size in more)

    def pages_in(self, size: int) -> int:
        """The most pages whose bytes, with those of the other kinds, are at most `size`."""
        if not self.more_bytes:
            return size // self.page_bytes
        return bisect_right(range(size // self.page_bytes + 1), size, key=self.bytes_of) - 1


def usable_bytes(config: EngineConfig, devices: Iterable[Any]) -> int:
    """Bytes that this engine may use on each device, by the one that has least: free memory within
    the accelerator client's limit, or a share of the host's free memory."""
    return min(_usable_bytes(config, device) for device in devices)


def _usable_bytes(config: EngineConfig, device: Any) -> int:
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return int(available_bytes() * config.gpu_memory_utilization)


def workspace_bytes(spec: ModelSpec, tokens: int, rows: int, itemsize: int, shards: int) -> int:
    """Reserve for the largest step: activations of `tokens` tokens and what sampling holds of the
    float32 logits of `rows` rows."""
    width = spec.width * 6 + (spec.inner_width * 4) // shards
    return tokens * width * itemsize + rows * spec.vocab_size * 4 * LOGIT_COPIES


def likely_bytes(spec: ModelSpec, tokens: int, scored: int, itemsize: int, shards: int) -> int:
    """What the largest step will need where Hopper's kernels compute it, as far as it can be told
    before it is compiled: of each of its tokens the residual stream four times and what gate and up
    give, which one kernel multiplies; or float32 logits of the `scored` prompt tokens whose
    log-probabilities are computed at once, and a quarter more. A 7B model needs 0.42 GiB of 0.52
    for 8192 tokens."""
    width = 4 * spec.width + spec.inner_width // shards
    return max(tokens * width * itemsize, scored * spec.vocab_size * 5)


def is_fitted(config: EngineConfig, room: MemoryBudget) -> bool:
    """Whether the pool gets what a compiled step leaves. A device that shares the host's memory, a
    pool of a size that was asked for, and one whose steps are not compiled before they run, keep to
    the estimate."""
    return not room.shared and _asked(config) is None and not config.enforce_eager


def resident_bytes(logit_rows: Sequence[int], slots: int, vocab_size: int, shards: int) -> int:
    """What stays on one device for sampling: float32 logits, the model's and those that `process`
    makes of them, for each row count, and 16-bit counts of each slot's tokens, where devices share
    a vocabulary that divides; and what requests ask of `process`."""
    split = sum(logit_rows) * vocab_size * 4 * 2 + (slots + 1) * vocab_size * 2
    return split // (shards if vocab_size % shards == 0 else 1) + logits_params_bytes(
        slots, vocab_size
    )


def states_shape(spec: ModelSpec, buckets: Buckets) -> tuple[int, int]:
    """Of what extends leave: the residual stream of every chunk token of the largest step."""
    return buckets.max_tokens, spec.width


def plan_memory(config: EngineConfig, room: MemoryBudget, need: KVRequirements) -> MemoryPlan:
    """Pages for the pool. Raises ConfigError with needed and available GiB, the longest length that
    fits, and the flags that help."""
    pages = pool_pages(config, room, need)
    if pages and need.bytes_of(pages) > room.left:
        raise ConfigError(oversized(config, room, need, pages))
    if pages < need.pages_per_request:
        raise ConfigError(_too_small(config, room, pages, need))
    return MemoryPlan(room, need.page_bytes, pages, need.bytes_of(pages))


def fitting_length(config: EngineConfig, room: MemoryBudget, need: KVRequirements) -> int:
    """The longest `max_model_len` whose pages fit, at most the model's own; for
    `max_model_len="auto"`.
    """
    pages = pool_pages(config, room, need)
    if pages >= need.pages_per_request:
        return need.max_model_len
    if not need.more_bytes:
        return min(need.max_model_len, pages * need.page_size)
    # In pages: what other kinds hold of a request depends on its length
    low, high = 0, need.pages_per_request
    while high - low > 1:
        middle = (low + high) // 2
        shorter = replace(need, max_model_len=middle * need.page_size)
        low, high = (
            (middle, high)
            if pool_pages(config, room, shorter) >= shorter.pages_per_request
            else (low, middle)
        )
    return low * need.page_size


def pool_pages(config: EngineConfig, room: MemoryBudget, need: KVRequirements) -> int:
    """How many pages the pool gets: as asked, or all that fit. On CPU no more than the requests at
    once can use."""
    if config.num_gpu_blocks_override is not None:
        return max(0, config.num_gpu_blocks_override)
    if config.kv_cache_memory_bytes is not None:
        return need.pages_in(max(0, config.kv_cache_memory_bytes))
    fitting = need.pages_in(max(0, room.left))
    if not room.shared:
        return fitting // PAGE_ROUND * PAGE_ROUND
    cap = max(need.pages_in(CPU_POOL_CAP), need.pages_per_request)
    useful = -(-need.max_num_seqs * need.pages_per_request // PAGE_ROUND) * PAGE_ROUND
    return min(fitting, cap, useful)


def _asked(config: EngineConfig) -> str | None:
    """The flag that sets the pool's size, with its value, None when memory does."""
    for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
        value = getattr(config, name)
        if value is not None:
            return f"--{name.replace('_', '-')} {value}"
    return None


def _whole(config: EngineConfig, room: MemoryBudget, need: KVRequirements) -> int:
    """Pages of the smallest pool with room for one longest request."""
    rounded = not room.shared and _asked(config) is None
    return (
        -(-need.pages_per_request // PAGE_ROUND) * PAGE_ROUND if rounded else need.pages_per_request
    )


def _too_small(config: EngineConfig, room: MemoryBudget, pages: int, need: KVRequirements) -> str:
    asked, longest = _asked(config), fitting_length(config, room, need)
    wanted = amount(need.bytes_of(_whole(config, room, need)))
    what = f"one request of max_model_len {need.max_model_len} tokens"
    if config.max_model_len in ("auto", -1):
        what = f"requests of up to {need.page_size} tokens"
    there = (
        room.said if asked is None else f"{asked} gives {amount(need.bytes_of(pages), down=True)}"
    )
    fits = f"the longest that fits is {longest} tokens" if longest else "no length fits"
    return f"to serve {what}, {wanted} of KV cache is needed, but {there}; {fits}. What helps: {_joined(remedies(config, room, need))}"


def _joined(helps: list[str]) -> str:
    return "; or ".join(helps) if helps else "a device with more memory, or a smaller model"


def remedies(config: EngineConfig, room: MemoryBudget, need: KVRequirements) -> list[str]:
    """Flags with values, each of which alone gives the pool the room for one longest request."""
    size = need.bytes_of(_whole(config, room, need))
    deficit, longest = size - room.left, fitting_length(config, room, need)
    helps = [f"--max-model-len {longest} (or auto)"] if longest else []
    if config.num_gpu_blocks_override is not None:
        return helps + (
            [f"--num-gpu-blocks-override {need.pages_per_request}"] if deficit <= 0 else []
        )
    if config.kv_cache_memory_bytes is not None:
        return (
            helps
            + ([f"--kv-cache-memory-bytes {size}"] if deficit <= 0 else [])
            + _more_devices(config, room, need)
        )
    share = (
        math.ceil(
            100 * config.gpu_memory_utilization * (room.usable + deficit) / max(1, room.usable)
        )
        / 100
    )
    if share <= 1:
        helps.append(f"--gpu-memory-utilization {share:.2f}")
    tokens = (
        int(need.step_tokens * (room.workspace - deficit) / room.workspace) // 16 * 16
        if room.workspace > deficit
        else 0
    )
    if tokens >= need.max_num_seqs:
        helps.append(f"--max-num-batched-tokens {tokens}")
    elif size <= room.usable - room.weights - room.spare - room.staged:
        helps.append(
            f"lower --max-num-batched-tokens ({need.step_tokens}) or --max-num-seqs ({need.max_num_seqs})"
        )
    return helps + _more_devices(config, room, need)


def _more_devices(config: EngineConfig, room: MemoryBudget, need: KVRequirements) -> list[str]:
    """The least tensor parallelism that helps. Devices that share their memory do not help."""
    for times in () if room.shared else need.splits:
        split = replace(room, weights=-(-room.weights // times))
        share = replace(
            need,
            page_bytes=-(-need.page_bytes // times),
            more_bytes=tuple(-(-size // times) for size in need.more_bytes),
        )
        pages = pool_pages(config, split, share)
        if share.pages_per_request <= pages and share.bytes_of(pages) <= split.left:
            return [
                f"--tensor-parallel-size {times * config.tensor_parallel_size}, over {times} times the devices"
            ]
    return []


def oversized(config: EngineConfig, room: MemoryBudget, need: KVRequirements, pages: int) -> str:
    """Why a pool of the size that was asked for cannot be."""
    fitting = need.pages_in(max(0, room.left))
    by_count = config.num_gpu_blocks_override is not None
    most = (
        f"--num-gpu-blocks-override {fitting}"
        if by_count
        else f"--kv-cache-memory-bytes {need.bytes_of(fitting)}"
    )
    free = replace(config, num_gpu_blocks_override=None, kv_cache_memory_bytes=None)
    helps = f"ask for at most {most}, or leave it out"
    if fitting < need.pages_per_request:
        helps = f"leave it out, with {_joined(remedies(free, room, need))}"
    return (
        f"a KV pool of {pages} pages needs {amount(need.bytes_of(pages))}, but {room.said}; {helps}"
    )
