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
from flax import nnx
from jax.sharding import Mesh

from jaxllm import models, weights
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

PAGE_SIZES = (8, 16, 32, 64, 128)
# Of every prompt step where one shape serves all: short prompts are padded to it, long ones lose
# little by it
UNIFORM_TOKENS = 512


@dataclass(frozen=True)
class Setup:
    """Everything decided before weights are read or programs compiled."""

    resolved: Resolved
    hf: dict[str, Any]
    mesh: Mesh
    dtype: Any
    need: KVRequirements
    memory: MemoryPlan
    buckets: Buckets
    kv: models.KVShape
    graphdef: Any
    abstract_weights: Any

    @property
    def longest(self) -> KVRequirements:
        """What the pools must serve, with the length that was decided."""
        return replace(self.need, max_model_len=self.resolved.max_model_len)

    @property
    def kinds(self) -> tuple[int, ...]:
        """Which kind each layer is of."""
        windows = self.resolved.windows
        return tuple(
            windows.index(window) if window in windows else 0
            for window in layer_windows(self.graphdef, self.abstract_weights)
        )


def resolve(config: EngineConfig, model_dir: Path, mesh: Mesh) -> Setup:
    """Decide everything; raises ConfigError before any loading work when it cannot be."""
    shards, platform = mesh.shape["tensor"], mesh.devices.flat[0].platform
    hf, dtype, kv_dtype = _configuration(config, model_dir, platform)
    kv, itemsize = models.kv_shape(hf, shards), dtype.itemsize
    graphdef, abstract = weights.abstract(hf, mesh, dtype)
    page_size = _page_size(config, 16 if platform == "cpu" else 64)
    max_num_seqs = config.max_num_seqs or (16 if platform == "cpu" else 256)
    length, _ = model_length(config, hf)
    budget = _step_tokens(config, min(length, 512) if platform == "cpu" else 8192, max_num_seqs)
    shapes = Shapes(
        dtype, kv.head_dim, page_size, max(1, hf["num_attention_heads"] // kv.kv_heads), kv_dtype
    )
    backend = choose_backend(mesh.devices.flat[0], shapes, config.attention_backend)
    buckets = (Buckets.uniform if config.batch_invariant else Buckets.build)(
        max_num_seqs, budget, platform
    )
    page = page_bytes(1, kv.kv_heads, page_size, kv.head_dim, kv_dtype) // shards  # of a layer
    caching = config.enable_prefix_caching and not length_dependent(hf, length)
    host = plan_host(config, kv.layers * page, shards, caching, HostRoom.of(platform))
    windows = [
        None if host.pages else short(window, length)
        for window in layer_windows(graphdef, abstract)
    ]
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
        splits(hf, shards),
    )
    room = MemoryBudget(
        usable=usable_bytes(config, mesh.devices.flat[0]),
        weights=shard_bytes(jax.tree.leaves(abstract)),
        workspace=workspace_bytes(hf, budget + max_num_seqs, buckets.logits[-1], itemsize, shards),
        shared=platform == "cpu",
        resident=resident_bytes(buckets.logits, max_num_seqs, hf["vocab_size"], shards)
        + math.prod(states_shape(hf, buckets)) * itemsize,
        spare=0 if platform == "cpu" else SPARE,
        staged=host.staged * kv.layers * page,
    )
    likely = (
        likely_bytes(hf, budget + max_num_seqs, buckets.score, itemsize, shards)
        if backend.name == "mosaic_gpu"
        else None
    )
    length, memory = _first_pool(config, hf, room, need, likely)
    resolved = Resolved(
        model_dir=str(model_dir),
        model_type=hf["model_type"],
        dtype=dtype.name,
        kv_dtype=kv_dtype.name,
        max_model_len=length,
        page_size=page_size,
        num_pages=memory.num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_queued_reqs=config.max_num_queued_reqs or max(256, 8 * max_num_seqs),
        vocab_size=hf["vocab_size"],
        tensor_parallel_size=shards,
        max_logprobs=min(config.max_logprobs, hf["vocab_size"]),
        logprobs_mode=config.logprobs_mode,
        enable_prefix_caching=config.enable_prefix_caching and not length_dependent(hf, length),
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
    return Setup(resolved, hf, mesh, dtype, need, memory, buckets, kv, graphdef, abstract)


def _configuration(
    config: EngineConfig, model_dir: Path, platform: str
) -> tuple[dict[str, Any], jnp.dtype, jnp.dtype]:
    """The model's configuration, complete, and for pages of 8 bits which scales the checkpoint
    brings; the model's type; the pages'."""
    hf = models.with_defaults(models.read_config(model_dir))
    dtype = weights.resolve_dtype(config.dtype, hf, platform)
    kv_dtype = _kv_dtype(config, hf, dtype)
    if kv_dtype != dtype:
        kv = models.kv_shape(hf, 1)
        hf[models.KV_SCALES] = weights.kv_scales(
            model_dir, kv.layers, kv.kv_heads, config.load_format
        )
    return hf, dtype, kv_dtype


def _kv_dtype(config: EngineConfig, hf: dict[str, Any], dtype: jnp.dtype) -> jnp.dtype:
    """The pages' type: 8 bits, as asked for or as the checkpoint wants, or the model's `dtype`."""
    asked = config.kv_cache_dtype
    if asked == "auto":
        asked = models.kv_cache_dtype(hf.get("quantization_config")) or asked
    found = jnp.dtype(KV_CACHE_DTYPES[asked] or dtype)
    if found != dtype and found.itemsize > 1:
        raise ConfigError(
            f"--kv-cache-dtype {asked} is neither of 8 bits nor what the model computes in; give {dtype}, fp8 or auto, or --dtype {asked}"
        )
    return found


def resized(setup: Setup, config: EngineConfig, workspace: int) -> Setup:
    """The same decisions, with the pool that is left when the largest step needs `workspace` bytes.
    Raises ConfigError as `resolve`."""
    length, memory = _pool(
        config, setup.hf, replace(setup.memory.room, workspace=workspace, likely=False), setup.need
    )
    caching = config.enable_prefix_caching and not length_dependent(setup.hf, length)
    resolved = replace(
        setup.resolved,
        max_model_len=length,
        num_pages=memory.num_pages,
        enable_prefix_caching=caching,
        windows=kinds(short(window, length) for window in setup.need.windows),
        more_pages=more_pages(setup.need, length, memory.num_pages),
    )
    return replace(setup, resolved=resolved, memory=memory)


def layer_windows(graphdef: nnx.GraphDef, abstract: nnx.State) -> list[int | None]:
    """The window of each layer of a model."""
    return nnx.merge(graphdef, abstract).windows


def short(window: int | None, length: int) -> int | None:
    """The window, if a sequence of `length` tokens does not fit it."""
    return None if window is None or window >= length else window


def splits(hf: dict[str, Any], shards: int) -> tuple[int, ...]:
    """Over how many times the devices weights and pages divide evenly: no KV head is kept twice."""

    def even(times: int) -> bool:
        try:
            return (
                models.kv_shape(hf, times * shards).kv_heads == models.kv_shape(hf, shards).kv_heads
            )
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
    hf: dict[str, Any],
    room: MemoryBudget,
    need: KVRequirements,
    likely: int | None = None,
) -> tuple[int, MemoryPlan]:
    """`_pool` as long as what a step needs is estimated. Where a step is going to be compiled, that
    says it (`sizing.fitted`, `start.check_peak`), and the estimate refuses nothing; with what a
    step `likely` needs the pool is most often right already."""
    if likely is not None and is_fitted(config, room):
        with contextlib.suppress(ConfigError):  # the step may need less
            return _pool(config, hf, replace(room, workspace=likely, likely=True), need)
    compiled = not room.shared and not config.enforce_eager
    length, memory = _pool(config, hf, replace(room, workspace=0) if compiled else room, need)
    return length, replace(memory, room=room)


def _pool(
    config: EngineConfig, hf: dict[str, Any], room: MemoryBudget, need: KVRequirements
) -> tuple[int, MemoryPlan]:
    """The longest sequence and the pool; `need` is for the longest that was asked."""
    _, auto = model_length(config, hf)
    length = max(1, fitting_length(config, room, need)) if auto else need.max_model_len
    return length, plan_memory(config, room, replace(need, max_model_len=length))


def model_length(config: EngineConfig, hf: dict[str, Any]) -> tuple[int, bool]:
    """(longest sequence, whether it may shrink to fit memory)."""
    limit = models.context_length(hf)
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


def length_dependent(hf: dict[str, Any], length: int) -> bool:
    """Whether keys depend on the prompt's length (dynamic RoPE beyond the native context), so that
    prompts cannot share pages."""
    return (
        models.rope_parameters(hf)["rope_type"] == "dynamic"
        and length > hf["max_position_embeddings"]
    )


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
