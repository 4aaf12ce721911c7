"""From what was asked (`EngineConfig`) and what there is (model, mesh) to what will be
(`Resolved`)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm import weights
from jaxllm.cache.backends import Shapes, choose_backend, tile_tokens
from jaxllm.cache.kv import page_bytes
from jaxllm.config import KV_CACHE_DTYPES, ConfigError, EngineConfig, Resolved
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.startup.host_memory import HostRoom, plan_host
from jaxllm.engine.startup.memory import (
    SPARE,
    KVRequirements,
    MemoryBudget,
    MemoryPlan,
    fitting_length,
    is_fitted,
    likely_bytes,
    plan_memory,
    resident_bytes,
    states_shape,
    usable_bytes,
    workspace_bytes,
)
from jaxllm.models import ModelSpec, read_spec
from jaxllm.nn.heads import Heads

PAGE_SIZES = (8, 16, 32, 64, 128)
# Of every prompt step where one shape serves all: short prompts are padded to it, long ones lose
# little by it
UNIFORM_TOKENS = 512


@dataclass(frozen=True)
class Setup:
    """Everything decided before weights are read or programs compiled."""

    resolved: Resolved
    spec: ModelSpec
    mesh: Mesh
    dtype: Any
    need: KVRequirements
    memory: MemoryPlan
    buckets: Buckets
    graphdef: Any
    abstract_weights: Any

    @property
    def heads(self) -> Heads:
        """The attention heads over this mesh."""
        return self.spec.heads(self.mesh.shape["tensor"])

    @property
    def longest(self) -> KVRequirements:
        """What the pools must serve, with the length that was decided."""
        return replace(self.need, max_model_len=self.resolved.max_model_len)

    @property
    def kinds(self) -> tuple[int, ...]:
        """Which kind each layer is of."""
        windows = self.resolved.windows
        return tuple(
            windows.index(window) if window in windows else 0 for window in self.spec.windows
        )


def resolve(
    config: EngineConfig, model_dir: Path, mesh: Mesh, spec: ModelSpec | None = None
) -> Setup:
    """Decide everything; raises ConfigError before any loading work when it cannot be.

    `spec` is the model's where it has been read already.
    """
    shards, platform = mesh.shape["tensor"], mesh.devices.flat[0].platform
    spec, dtype, kv_dtype = _model(config, model_dir, spec or read_spec(model_dir), platform)
    heads, layers, itemsize = spec.heads(shards), len(spec.layers), dtype.itemsize
    graphdef, abstract = weights.abstract(spec, mesh, dtype)
    page_size = _page_size(config, 16 if platform == "cpu" else 64)
    max_num_seqs = config.max_num_seqs or (16 if platform == "cpu" else 256)
    length, _ = model_length(config, spec)
    budget = _step_tokens(config, min(length, 512) if platform == "cpu" else 8192, max_num_seqs)
    shapes = Shapes(dtype, heads.dim, page_size, max(1, heads.query // heads.kv_stored), kv_dtype)
    backend = choose_backend(mesh.devices.flat[0], shapes, config.attention_backend)
    buckets = (Buckets.batch_invariant if config.batch_invariant else Buckets.build)(
        max_num_seqs, budget, platform
    )
    page = page_bytes(1, heads.kv_stored, page_size, heads.dim, kv_dtype) // shards  # of a layer
    caching = config.enable_prefix_caching and not spec.keys_vary(length)
    host = plan_host(config, layers * page, shards, caching, HostRoom.of(platform))
    windows = [None if host.pages else short(window, length) for window in spec.windows]
    first, *more = (windows.count(window) * page for window in kinds(windows))
    need = KVRequirements(
        first,
        page_size,
        max_num_seqs,
        length,
        budget,
        kinds(windows),
        tile_tokens(backend.name),
        tuple(more),
        splits(spec, shards),
    )
    room = MemoryBudget(
        usable=usable_bytes(config, mesh.devices.flat),
        weights=shard_bytes(jax.tree.leaves(abstract)),
        workspace=workspace_bytes(
            spec, budget + max_num_seqs, buckets.logits[-1], itemsize, shards
        ),
        shared=platform == "cpu",
        resident=resident_bytes(buckets.logits, max_num_seqs, spec.vocab_size, shards)
        + math.prod(states_shape(spec, buckets)) * itemsize,
        spare=0 if platform == "cpu" else SPARE,
        staged=host.staged * layers * page,
    )
    likely = (
        likely_bytes(spec, budget + max_num_seqs, buckets.score, itemsize, shards)
        if backend.name == "mosaic_gpu"
        else None
    )
    length, memory = _first_pool(config, spec, room, need, likely)
    resolved = Resolved(
        model_dir=str(model_dir),
        model_type=spec.model_type,
        dtype=dtype.name,
        kv_dtype=kv_dtype.name,
        max_model_len=length,
        page_size=page_size,
        num_pages=memory.num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_queued_reqs=config.max_num_queued_reqs or max(256, 8 * max_num_seqs),
        vocab_size=spec.vocab_size,
        tensor_parallel_size=shards,
        max_logprobs=min(config.max_logprobs, spec.vocab_size),
        logprobs_mode=config.logprobs_mode,
        enable_prefix_caching=config.enable_prefix_caching and not spec.keys_vary(length),
        async_scheduling=config.async_scheduling,
        scheduling_policy=config.scheduling_policy,
        preemption_mode=config.preemption_mode,
        host_pages=host.pages,
        host_cached_pages=host.cached,
        moved_pages=host.moved,
        attention_backend=backend.name,
        attention_reason=backend.reason,
        windows=kinds(short(window, length) for window in need.windows),
        more_pages=more_pages(need, length, memory.num_pages),
        batch_invariant=config.batch_invariant,
    )
    return Setup(resolved, spec, mesh, dtype, need, memory, buckets, graphdef, abstract)


def _model(
    config: EngineConfig, model_dir: Path, spec: ModelSpec, platform: str
) -> tuple[ModelSpec, jnp.dtype, jnp.dtype]:
    """The spec, with the checkpoint's own scales where pages are of 8 bits; the dtypes of the model
    and of its pages."""
    dtype = weights.resolve_dtype(config.dtype, spec.stored_dtype, platform)
    kv_dtype = _kv_dtype(config, spec, dtype)
    if kv_dtype != dtype:
        kv = spec.heads(1).kv
        scales = weights.kv_scales(model_dir, len(spec.layers), kv, config.load_format)
        spec = spec.with_scales(scales)
    return spec, dtype, kv_dtype


def _kv_dtype(config: EngineConfig, spec: ModelSpec, dtype: jnp.dtype) -> jnp.dtype:
    """The pages' dtype: 8 bits as the user or the checkpoint wishes, else the model's `dtype`."""
    wish = spec.kv_cache_dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    found = jnp.dtype(KV_CACHE_DTYPES[wish] or dtype)
    if found != dtype and found.itemsize > 1:
        raise ConfigError(
            f"--kv-cache-dtype {wish} is neither of 8 bits nor what the model computes in; "
            f"give {dtype}, fp8 or auto, or --dtype {wish}"
        )
    return found


def resized(setup: Setup, config: EngineConfig, workspace: int) -> Setup:
    """The same decisions, with the pool that is left when the largest step needs `workspace` bytes.
    Raises ConfigError as `resolve`."""
    length, memory = _pool(
        config,
        setup.spec,
        replace(setup.memory.room, workspace=workspace, likely=False),
        setup.need,
    )
    caching = config.enable_prefix_caching and not setup.spec.keys_vary(length)
    resolved = replace(
        setup.resolved,
        max_model_len=length,
        num_pages=memory.num_pages,
        enable_prefix_caching=caching,
        windows=kinds(short(window, length) for window in setup.need.windows),
        more_pages=more_pages(setup.need, length, memory.num_pages),
    )
    return replace(setup, resolved=resolved, memory=memory)


def short(window: int | None, length: int) -> int | None:
    """The window, if a sequence of `length` tokens does not fit it."""
    return None if window is None or window >= length else window


def splits(spec: ModelSpec, shards: int) -> tuple[int, ...]:
    """Over how many times the devices weights and pages divide evenly: no KV head is kept twice."""

    def even(times: int) -> bool:
        try:
            return spec.heads(times * shards).kv_stored == spec.heads(shards).kv_stored
        except ConfigError:
            return False

    return tuple(filter(even, (2, 4, 8)))


def kinds(windows: Iterable[int | None]) -> tuple[int | None, ...]:
    """The different windows, none before all others and wide ones before narrow ones: a kind of
    layers each."""
    return tuple(sorted(set(windows), key=lambda window: -math.inf if window is None else -window))


def more_pages(need: KVRequirements, length: int, pages: int) -> tuple[int, ...]:
    """Pages of each kind of layers after the first, which has so many, when the longest sequence
    has `length` tokens. Kinds that are one then have equally many."""
    need = replace(need, max_model_len=length)
    found = {
        short(window, length): count
        for window, count in zip(need.windows[1:], need.more_pages(pages), strict=True)
    }
    return tuple(
        found[window] for window in kinds(short(window, length) for window in need.windows)[1:]
    )


def _first_pool(
    config: EngineConfig,
    spec: ModelSpec,
    room: MemoryBudget,
    need: KVRequirements,
    likely: int | None = None,
) -> tuple[int, MemoryPlan]:
    """`_pool` as long as what a step needs is estimated. Where a step is going to be compiled, that
    says it (`sizing.fitted`, `start.check_peak`), and the estimate refuses nothing; with what a
    step `likely` needs the pool is most often right already."""
    if likely is not None and is_fitted(config, room):
        with contextlib.suppress(ConfigError):  # the step may need less
            return _pool(config, spec, replace(room, workspace=likely, likely=True), need)
    compiled = not room.shared and not config.enforce_eager
    length, memory = _pool(config, spec, replace(room, workspace=0) if compiled else room, need)
    return length, replace(memory, room=room)


def _pool(
    config: EngineConfig, spec: ModelSpec, room: MemoryBudget, need: KVRequirements
) -> tuple[int, MemoryPlan]:
    """The longest sequence and the pool; `need` is for the longest that was asked."""
    _, auto = model_length(config, spec)
    length = max(1, fitting_length(config, room, need)) if auto else need.max_model_len
    return length, plan_memory(config, room, replace(need, max_model_len=length))


def model_length(config: EngineConfig, spec: ModelSpec) -> tuple[int, bool]:
    """(longest sequence, whether it may shrink to fit memory)."""
    limit = spec.context_length
    asked = config.max_model_len
    if asked is None:
        return limit, False
    if asked in ("auto", -1):
        return limit, True
    asked = int(asked)
    if asked < 1:
        raise ConfigError(f"--max-model-len must be at least 1, got {asked}")
    if asked > limit:
        raise ConfigError(
            f"--max-model-len {asked} is longer than the model allows ({limit} tokens); ask for at most that, or auto"
        )
    return asked, False


def shard_bytes(leaves: Iterable[jax.ShapeDtypeStruct]) -> int:
    """Bytes of these arrays on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
        for leaf in leaves
    )


def _page_size(config: EngineConfig, usual: int) -> int:
    """Tokens of a page."""
    page_size = usual if config.block_size is None else config.block_size
    if page_size not in PAGE_SIZES:
        raise ConfigError(
            f"--block-size must be one of {', '.join(map(str, PAGE_SIZES))}, got {page_size}"
        )
    return page_size


def _step_tokens(config: EngineConfig, usual: int, max_num_seqs: int) -> int:
    """Tokens of the largest step."""
    usual = min(usual, UNIFORM_TOKENS) if config.batch_invariant else usual
    budget = config.max_num_batched_tokens or max(usual, max_num_seqs)
    if budget < max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens ({budget}) must be at least --max-num-seqs ({max_num_seqs}), "
            "since every running request may decode a token"
        )
    return budget
