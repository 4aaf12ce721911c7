"""`ModelPlan`: how a model lies on its devices and computes, decided before its pools have a
size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm import weights
from jaxllm.cache.arrays import page_bytes
from jaxllm.cache.backends import (
    Backend,
    LatentShapes,
    SegmentShapes,
    Shapes,
    Target,
    choose_backends,
    tile_tokens,
)
from jaxllm.cache.layer import AttentionCache, attention_cache
from jaxllm.cache.peers import XLA, Layout, Sums, choose_sums, inbox_layout
from jaxllm.config import KV_CACHE_DTYPES, ConfigError, EngineConfig
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.plan import Limits
from jaxllm.engine.startup.budget import (
    MemoryBudget,
    likely_step_bytes,
    measure_budget,
    shard_bytes,
)
from jaxllm.engine.startup.device_client import own_processors
from jaxllm.engine.startup.host_memory import HostPlan, HostRoom, plan_host
from jaxllm.engine.startup.kv_requirements import (
    KVRequirements,
    model_groups,
    page_sizes,
    splits,
)
from jaxllm.engine.startup.limits import divide, shares_prefixes, step_buckets, step_limits
from jaxllm.engine.startup.wishes import Wishes
from jaxllm.mesh import Stage, layer_devices, over_experts, own_devices, own_meshes, stages
from jaxllm.models import ModelSpec
from jaxllm.models.config.expert_groups import expert_groups


@dataclass(frozen=True)
class ModelPlan:
    """A model on the devices of one stage. All stages of an engine decide the same but for the
    last four fields.

    Attributes:
        wishes: what was asked for.
        spec: the model with the formats of its weights, with heads as attention wants them, and
            with the checkpoint's scales where pages have 8 bits.
        meshes: the devices of all stages, in their order.
        dtype: of weights and activations.
        kv_dtype: of pages.
        page_size: tokens of a page.
        backend: of attention.
        limits: of a step and a sequence.
        buckets: shapes to compile.
        host: pages in host memory.
        need: what the pools must serve, for the longest sequence that was asked for.
        sums: how devices add up their parts of a layer.
        target: what kernels are chosen for.
        budget: what takes memory on each device, with an upper estimate of the largest step.
        likely_step: what that should need, in bytes; None where nothing tells.
        stage: which layers these devices have.
        mesh: these devices, in groups that have experts of their own.
        outline: the stage without its weights.
    """

    wishes: Wishes
    spec: ModelSpec
    meshes: tuple[Mesh, ...]
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    page_size: int
    backend: Backend
    limits: Limits
    buckets: Buckets
    host: HostPlan
    need: KVRequirements
    sums: Sums
    target: Target
    budget: MemoryBudget
    likely_step: int | None
    stage: Stage
    mesh: Mesh
    outline: weights.Outline

    @property
    def config(self) -> EngineConfig:
        """The configuration."""
        return self.wishes.config

    @property
    def device(self) -> Any:
        """One of the devices, which are all of one kind."""
        return self.mesh.devices.flat[0]

    @property
    def own_devices(self) -> list[jax.Device]:
        """Those of this process, of all its stages."""
        return own_devices(self.meshes)

    def own_stages(self) -> list[ModelPlan]:
        """The stages of this process, of which this one is the last."""
        *before, _ = own_meshes(self.meshes)
        return [*map(self.at_stage, before), self]

    def at_stage(self, index: int) -> ModelPlan:
        """The same decisions for another stage."""
        stage = stages(self.stage.count)[index]
        mesh = over_experts(self.meshes[index], self.mesh.shape["expert"])
        outline = weights.outline(self.spec, mesh, self.dtype, stage)
        return replace(self, mesh=mesh, stage=stage, outline=outline)

    def with_steps(self, tokens: int, seqs: int) -> ModelPlan:
        """What would be decided of an engine with steps of at most `tokens` tokens, and with `seqs`
        requests at once. Raises ConfigError as `plan_model`."""
        config = replace(self.config, max_num_batched_tokens=tokens, max_num_seqs=seqs)
        # Pages in host memory do not depend on steps, and may be pinned by now: less of it is free,
        # on each host another amount
        trial = plan_model(replace(self.wishes, config=config), self.meshes, self.host)
        # Weights may be on the devices by now
        return replace(trial, budget=replace(trial.budget, usable=self.budget.usable))


class _Model(NamedTuple):
    """A model on the devices of a stage, and how they compute it."""

    spec: ModelSpec
    mesh: Mesh
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    page_size: int
    target: Target
    backend: Backend

    @property
    def platform(self) -> str:
        """Of the devices."""
        return self.mesh.devices.flat[0].platform

    @property
    def shards(self) -> int:
        """Devices over which a layer is split."""
        return layer_devices(self.mesh)

    def page_bytes(self, cache: AttentionCache) -> int:
        """Bytes on one device of a page of one layer."""
        return page_bytes(cache, self.shards, self.page_size, self.kv_dtype) // self.shards


def plan_model(wishes: Wishes, meshes: Sequence[Mesh], host: HostPlan | None = None) -> ModelPlan:
    """Decide everything but the pools' size, for the last stage of this process; `meshes` are those
    of all stages. Raises ConfigError when it cannot work.

    Args:
        host: pages in host memory, where they are decided already; None measures what is free.
    """
    config = wishes.config
    limits = step_limits(config, wishes.spec, meshes[-1].devices.flat[0].platform)
    pipeline = divide(config, wishes.spec, limits.max_num_seqs)
    last = max(own_meshes(meshes))
    model = _model(wishes, meshes[last])
    spec, mesh, dtype, *_ = model
    buckets = step_buckets(config, spec, limits, model.platform)
    if host is None:
        host = _host(config, model, limits)
    need = _requirements(config, model, limits, host)
    outlines = [weights.outline(spec, mesh, dtype, stage) for stage in pipeline]
    leaves = max((jax.tree.leaves(outline.state) for outline in outlines), key=shard_bytes)
    sums = _sums(config, model, buckets.max_rows)
    staged = host.staged * need.group_bytes
    budget = measure_budget(config, spec, meshes, leaves, buckets, dtype.itemsize, staged)
    resident = budget.resident
    if sums.by_inboxes:
        resident += largest_inboxes(mesh, spec, buckets).size
    usable = min(wishes.hosts.agree(budget.usable))
    return ModelPlan(
        wishes=wishes,
        spec=spec,
        meshes=tuple(meshes),
        dtype=dtype,
        kv_dtype=model.kv_dtype,
        page_size=model.page_size,
        backend=model.backend,
        limits=limits,
        buckets=buckets,
        host=host,
        need=need,
        sums=sums,
        target=model.target,
        budget=replace(budget, usable=usable, resident=resident),
        likely_step=likely_step_bytes(
            spec, model.backend, model.target, buckets, dtype.itemsize, layer_devices(mesh)
        ),
        stage=pipeline[last],
        mesh=mesh,
        outline=outlines[last],
    )


def _model(wishes: Wishes, mesh: Mesh) -> _Model:
    """The spec with the formats of its weights, heads as the attention back end wants them, and the
    checkpoint's own scales where pages are of 8 bits. Raises ConfigError."""
    config = wishes.config
    platform = mesh.devices.flat[0].platform
    dtype = weights.resolve_dtype(config.dtype, wishes.spec.stored_dtype, platform)
    formats = weights.weight_formats(
        wishes.files, wishes.spec, config.quantization, config.load_format
    )
    spec = replace(wishes.spec, formats=formats)
    kv_dtype = _kv_dtype(config, spec, dtype)
    if kv_dtype != dtype:
        spec = spec.with_scales(weights.kv_scales(wishes.files, spec, config.load_format))
    shards = layer_devices(mesh)
    mesh = over_experts(mesh, expert_groups(config, spec))
    page_size = config.block_size or (16 if platform == "cpu" else 64)
    shapes = [
        _shapes(spec, layer, shards, dtype, page_size, kv_dtype) for layer in spec.attention_layers
    ]
    target = target_of(mesh)
    device_kind = mesh.devices.flat[0].device_kind
    backends = choose_backends(target, shapes, config.attention_backend, device_kind)
    widths = dict(zip(spec.attention_layers, backends, strict=False))
    spec = spec.with_widths(
        widths[layer].head_dim if layer in widths else None for layer in range(len(spec.layers))
    )
    return _Model(spec, mesh, dtype, kv_dtype, page_size, target, backends[0])


def target_of(mesh: Mesh) -> Target:
    """What kernels are chosen for: one of the devices, with the processors that each has."""
    processors = own_processors(mesh.devices.flat)
    return replace(Target.of(mesh.devices.flat[0]), processors=processors)


def _kv_dtype(config: EngineConfig, spec: ModelSpec, dtype: jnp.dtype) -> jnp.dtype:
    """The pages' dtype: 8 bits as the user or the checkpoint wishes, else the model's `dtype`."""
    wish = config.kv_cache_dtype
    if wish == "auto":
        wish = spec.kv_cache_dtype
    pages = jnp.dtype(KV_CACHE_DTYPES[wish] or dtype)
    if pages != dtype and pages.itemsize > 1:
        raise ConfigError(
            f"--kv-cache-dtype {wish} is neither of 8 bits nor what the model computes in; "
            f"give {dtype}, fp8 or auto, or --dtype {wish}"
        )
    if pages != dtype and spec.rounding_refusal is not None:
        raise ConfigError(f"--kv-cache-dtype {wish}: {spec.rounding_refusal}; give {dtype}")
    return pages


def _shapes(
    spec: ModelSpec,
    layer: int,
    shards: int,
    dtype: jnp.dtype,
    page_size: int,
    kv_dtype: jnp.dtype,
) -> Shapes | SegmentShapes:
    """What a layer has to say about the attention back end."""
    heads = spec.heads(shards, layer)
    if spec.pooling is not None and spec.pooling.bidirectional:
        return SegmentShapes(dtype, heads.stored_dim)
    group = max(1, heads.query // heads.kv_stored)
    rank = attention_cache(spec.layers, layer).rank
    if rank is not None:
        return LatentShapes(dtype, heads.stored_dim, page_size, group, kv_dtype, rank)
    return Shapes(dtype, heads.stored_dim, page_size, group, kv_dtype)


def _sums(config: EngineConfig, model: _Model, rows: int) -> Sums:
    """How devices add up their parts of a step of `rows` rows."""
    mesh = model.mesh
    spec = model.spec
    if mesh.size > 1 and config.enforce_eager:
        return Sums(XLA, "programs that load late would keep others waiting")
    if spec.pooling is not None:
        return Sums(XLA, "a pooling model")
    if mesh.size > 1 and config.pipeline_parallel_size > 1:
        return Sums(XLA, "devices of a stage")
    if config.nnodes > 1:
        return Sums(XLA, "devices of several hosts")
    return choose_sums(mesh, rows, spec.width, model.dtype)


def largest_inboxes(mesh: Mesh, spec: ModelSpec, buckets: Buckets) -> Layout:
    """The inboxes for the largest step."""
    return inbox_layout(mesh, buckets.max_rows, spec.width, buckets.logits[-1])


def _host(config: EngineConfig, model: _Model, limits: Limits) -> HostPlan:
    """Pages in host memory. Raises ConfigError."""
    spec = model.spec
    length = limits.max_model_len
    caching = shares_prefixes(config, spec, length)
    room = HostRoom.measure(model.platform)
    _check_moves(config, spec)
    divided = _divided(config, spec)
    groups = model_groups(replace(spec, pooling=None), length, keeps_all=True)
    page = sum(page_sizes(groups, divided, model.page_bytes))
    host = plan_host(config, page, model.shards * len(divided), caching, room)
    if spec.pooling is not None and host.pages:
        raise ConfigError(
            "a pooling model moves no pages to host memory; leave out --kv-offloading-size and "
            "--preemption-mode swap"
        )
    return host


def _check_moves(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError where pages are to leave the device of a model that allows it not."""
    flags = {
        "--kv-transfer-config": config.kv_transfer_config is not None,
        "--kv-offloading-size": bool(config.kv_offloading_size),
        "--preemption-mode swap": config.preemption_mode == "swap",
    }
    wanted = [flag for flag, is_wanted in flags.items() if is_wanted]
    if wanted and spec.move_refusal is not None:
        raise ConfigError(f"{wanted[0]}: {spec.move_refusal}; leave it out")


def _divided(config: EngineConfig, spec: ModelSpec) -> list[range]:
    """The layers of each stage."""
    return [stage.layers(len(spec.layers)) for stage in stages(config.pipeline_parallel_size)]


def _requirements(
    config: EngineConfig, model: _Model, limits: Limits, host: HostPlan
) -> KVRequirements:
    """What the pools must serve."""
    spec = model.spec
    length = limits.max_model_len
    groups = model_groups(spec, length, keeps_all=host.pages > 0)
    return KVRequirements(
        page_bytes=page_sizes(groups, _divided(config, spec), model.page_bytes),
        page_size=model.page_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=length,
        step_tokens=limits.max_num_batched_tokens,
        groups=tuple(group for group in groups if group.spec.has_pages),
        tile=tile_tokens(model.backend.name),
        splits=splits(spec, model.shards),
    )
