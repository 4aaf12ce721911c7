"""From what was asked for (`EngineConfig`), the model and its devices to what will be
(`Resolved`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm import weights
from jaxllm.cache.arrays import page_bytes
from jaxllm.cache.backends import (
    HOPPER,
    Backend,
    LatentShapes,
    SegmentShapes,
    Shapes,
    Target,
    choose_backends,
    tile_tokens,
)
from jaxllm.cache.groups import CacheGroup
from jaxllm.cache.layer import AttentionCache, attention_cache
from jaxllm.cache.peers import XLA, Layout, Sums, by_inboxes, choose_sums, inbox_layout
from jaxllm.config import KV_CACHE_DTYPES, ConfigError, EngineConfig, Resolved, step_seqs
from jaxllm.engine.runtime.state import MAX_STOP_IDS
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.plan import Limits
from jaxllm.engine.startup.device_client import own_processors
from jaxllm.engine.startup.host_memory import HostPlan, HostRoom, plan_host
from jaxllm.engine.startup.kv_requirements import KVRequirements, model_groups, page_sizes
from jaxllm.engine.startup.memory import (
    MemoryPlan,
    expected_workspace_bytes,
    measure_budget,
    shard_bytes,
)
from jaxllm.engine.startup.pipeline.divide import divide
from jaxllm.engine.startup.plan_memory import first_plan, model_length, splits
from jaxllm.hosts.group import ALONE, Hosts, difference
from jaxllm.logprobs import most_logprobs
from jaxllm.mesh import WHOLE, Stage, layer_devices, over_experts, own_meshes, stages
from jaxllm.models import ModelSpec, Wish, read_spec
from jaxllm.models.config.expert_groups import expert_groups
from jaxllm.nn.heads import Heads
from jaxllm.nn.weight.schemes import has_kernel
from jaxllm.sampling.options import MAX_STOP_TOKEN_IDS

# Of every prompt step where one shape serves all: short prompts are padded to it, long ones lose
# little by it
BATCH_INVARIANT_TOKENS = 512
PRODUCER_TOKENS = 2048  # whose pages travel while the next step runs; the last steps are shorter


@dataclass(frozen=True)
class Setup:
    """Everything decided before weights are read or programs compiled.

    Attributes:
        resolved: the decisions that the running engine reads.
        spec: the model, with the checkpoint's scales where pages have 8 bits.
        mesh: the devices, in groups that have experts of their own.
        dtype: of weights and activations.
        need: what the pools must serve, for the longest sequence that was asked for.
        memory: the pool and where its size comes from.
        buckets: shapes to compile.
        outline: the model without its weights.
        hosts: that decide together.
        stage: which layers these devices have. All stages decide the same.
    """

    resolved: Resolved
    spec: ModelSpec
    mesh: Mesh
    dtype: Any
    need: KVRequirements
    memory: MemoryPlan
    buckets: Buckets
    outline: weights.Outline
    hosts: Hosts = ALONE
    stage: Stage = WHOLE

    @property
    def longest(self) -> KVRequirements:
        """What the pools must serve, for the longest sequence that was decided."""
        return self.need.at_length(self.resolved.max_model_len)

    @property
    def peers(self) -> Layout | None:
        """Of the inboxes by which devices add up; None where XLA does."""
        if not by_inboxes(self.resolved.all_reduce):
            return None
        return largest_inboxes(self.mesh, self.spec, self.buckets)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups of the whole model."""
        resolved = self.resolved
        return model_groups(self.spec, resolved.max_model_len, resolved.host_pages > 0)

    @property
    def layers(self) -> range:
        """The layers of the stage."""
        return self.stage.layers(len(self.spec.layers))


class _Model(NamedTuple):
    """A model on the devices of a stage, and how they compute it."""

    directory: Path
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
    def heads(self) -> Heads:
        """The attention heads over the mesh."""
        return self.spec.heads(layer_devices(self.mesh))


type Found = ModelSpec | None  # the model's, where it has been read already


def resolve(
    config: EngineConfig,
    files: weights.ModelFiles,
    meshes: Sequence[Mesh],
    spec: Found = None,
    hosts: Hosts = ALONE,
) -> Setup:
    """Decide everything, for the last stage of this process; `files` are the model's, `meshes`
    those of all stages. Raises ConfigError when it cannot work."""
    spec = spec or read_spec(files.path, Wish.of(config))
    limits = _limits(config, spec, meshes[-1].devices.flat[0].platform)
    pipeline = divide(config, spec, limits.max_num_seqs)
    last = max(own_meshes(meshes))
    model = _model(config, files, spec, meshes[last])
    spec, mesh, dtype = model.spec, model.mesh, model.dtype
    buckets = _buckets(config, spec, limits, model.platform)
    need, host = _cache(config, model, limits)
    outlines = [weights.outline(spec, mesh, dtype, stage) for stage in pipeline]
    leaves = max((jax.tree.leaves(each.state) for each in outlines), key=shard_bytes)
    rows = buckets.max_rows
    sums, staged = _sums(config, model, rows), host.staged * need.group_bytes
    budget = measure_budget(config, spec, meshes, leaves, buckets, rows, dtype.itemsize, staged)
    resident = budget.resident + _inbox_bytes(sums, mesh, spec, buckets)
    budget = replace(budget, usable=min(hosts.agree(budget.usable)), resident=resident)
    memory = first_plan(config, budget, need, _expected_workspace(model, rows, buckets.score))
    resolved = _resolved(config, model, limits, host, memory, sums)
    decided = resolved, spec, mesh, dtype, need, memory, buckets, outlines[last]
    return with_plan(Setup(*decided, hosts, pipeline[last]), config, memory)


def _resolved(
    config: EngineConfig,
    model: _Model,
    limits: Limits,
    host: HostPlan,
    memory: MemoryPlan,
    sums: Sums,
) -> Resolved:
    """What the running engine reads; `with_plan` adds what follows from the pool."""
    spec, slots = model.spec, limits.max_num_seqs
    return Resolved(
        model_dir=str(model.directory),
        model_type=spec.model_type,
        dtype=model.dtype.name,
        kv_dtype=model.kv_dtype.name,
        max_model_len=memory.max_model_len,
        page_size=model.page_size,
        group_pages=(memory.num_pages,),
        max_num_seqs=slots,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_queued_reqs=config.max_num_queued_reqs or max(256, 8 * slots),
        vocab_size=spec.vocab_size,
        eos_ids=_eos_ids(spec),
        tensor_parallel_size=layer_devices(model.mesh),
        expert_parallel_size=model.mesh.shape["expert"],
        max_logprobs=most_logprobs(config.max_logprobs, spec.vocab_size),
        logprobs_mode=config.logprobs_mode,
        enable_prefix_caching=config.enable_prefix_caching,
        async_scheduling=config.async_scheduling,
        scheduling_policy=config.scheduling_policy,
        preemption_mode=config.preemption_mode,
        host_pages=host.pages,
        host_cached_pages=host.cached,
        moved_pages=host.moved,
        staged_pages=host.staged,
        attention_backend=model.backend.name,
        attention_reason=model.backend.reason,
        batch_invariant=config.batch_invariant,
        prefix_refusal=spec.prefix_refusal,
        pooling=spec.pooling,
        pipeline_parallel_size=config.pipeline_parallel_size,
        target=model.target,
        **sums._asdict(),
    )


def _eos_ids(spec: ModelSpec) -> tuple[int, ...]:
    """The model's end-of-sequence ids. Raises ConfigError when a slot cannot hold them beside a
    request's own stop ids."""
    limit = MAX_STOP_IDS - MAX_STOP_TOKEN_IDS
    if len(spec.eos_token_ids) > limit:
        raise ConfigError(
            f"config.json and generation_config.json name {len(spec.eos_token_ids)} "
            f"end-of-sequence ids; at most {limit} are supported"
        )
    return spec.eos_token_ids


def with_plan(setup: Setup, config: EngineConfig, memory: MemoryPlan) -> Setup:
    """The same decisions with another pool."""
    length = memory.max_model_len
    spec = setup.spec.serving(length)
    if spec.ropes != setup.spec.ropes:
        outline = weights.outline(spec, setup.mesh, setup.dtype, setup.stage)
        setup = replace(setup, outline=outline)
    need = setup.need.at_length(length)
    resolved = replace(
        setup.resolved,
        max_model_len=length,
        group_pages=need.group_pages(memory.num_pages),
        enable_prefix_caching=_shares_prefixes(config, setup.spec, length),
        windows=need.windows,
    )
    return replace(setup, spec=spec, resolved=resolved, memory=memory)


def _model(config: EngineConfig, files: weights.ModelFiles, spec: ModelSpec, mesh: Mesh) -> _Model:
    """The spec with the formats of its weights, heads as the attention back end wants them, and the
    checkpoint's own scales where pages are of 8 bits. Raises ConfigError."""
    platform, shards = mesh.devices.flat[0].platform, layer_devices(mesh)
    dtype = weights.resolve_dtype(config.dtype, spec.stored_dtype, platform)
    formats = weights.weight_formats(files, spec, config.quantization, config.load_format)
    spec = replace(spec, formats=formats)
    kv_dtype = _kv_dtype(config, spec, dtype)
    if kv_dtype != dtype:
        spec = spec.with_scales(weights.kv_scales(files, spec, config.load_format))
    mesh = over_experts(mesh, expert_groups(config, spec))
    page_size = config.block_size or (16 if platform == "cpu" else 64)
    shapes = [
        _shapes(spec, layer, shards, dtype, page_size, kv_dtype) for layer in spec.attention_layers
    ]
    target = target_of(mesh)
    device_kind = mesh.devices.flat[0].device_kind
    backends = choose_backends(target, shapes, config.attention_backend, device_kind)
    widths = dict(zip(spec.attention_layers, backends, strict=True))
    spec = spec.with_widths(
        widths[layer].head_dim if layer in widths else None for layer in range(len(spec.layers))
    )
    return _Model(files.path, spec, mesh, dtype, kv_dtype, page_size, target, backends[0])


def target_of(mesh: Mesh) -> Target:
    """What kernels are chosen for: one of the devices, with the processors that each has."""
    processors = own_processors(mesh.devices.flat)
    return replace(Target.of(mesh.devices.flat[0]), processors=processors)


def _sums(config: EngineConfig, model: _Model, rows: int) -> Sums:
    """How devices add up their parts of a step of so many rows."""
    mesh, spec = model.mesh, model.spec
    if mesh.size > 1 and config.enforce_eager:
        return Sums(XLA, "programs that load late would keep others waiting")
    if spec.pooling is not None:
        return Sums(XLA, "a pooling model")
    if mesh.size > 1 and config.pipeline_parallel_size > 1:
        return Sums(XLA, "devices of a stage")
    if config.nnodes > 1:
        return Sums(XLA, "devices of several hosts")
    return choose_sums(mesh, rows, spec.width, model.dtype)


def _inbox_bytes(sums: Sums, mesh: Mesh, spec: ModelSpec, buckets: Buckets) -> int:
    """Bytes of a device's inbox; 0 where XLA adds up."""
    return largest_inboxes(mesh, spec, buckets).size if sums.by_inboxes else 0


def largest_inboxes(mesh: Mesh, spec: ModelSpec, buckets: Buckets) -> Layout:
    """The inboxes for the largest step."""
    return inbox_layout(mesh, buckets.max_rows, spec.width, buckets.logits[-1])


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


def _buckets(config: EngineConfig, spec: ModelSpec, limits: Limits, platform: str) -> Buckets:
    """The shapes to compile."""
    build = Buckets.build if spec.pooling is None else Buckets.pooling
    build = Buckets.batch_invariant if config.batch_invariant else build
    seqs = step_seqs(limits.max_num_seqs, config.pipeline_parallel_size)
    return build(seqs, limits.max_num_batched_tokens, platform)


def _expected_workspace(model: _Model, rows: int, scored: int) -> int | None:
    """What a step of so many rows should need where Hopper's kernels run; None elsewhere."""
    spec, itemsize = model.spec, model.dtype.itemsize
    is_expected = model.backend.is_kernel and HOPPER.met_by(model.target)
    if not is_expected or not all(has_kernel(kind, model.target) for kind in spec.formats.values()):
        return None  # weights in few bits without a kernel are unpacked
    return expected_workspace_bytes(spec, rows, scored, itemsize, layer_devices(model.mesh))


def _shares_prefixes(config: EngineConfig, spec: ModelSpec, length: int) -> bool:
    """Whether prompts of at most `length` tokens may start from each other's pages. A pool over
    all tokens needs hidden states that no page holds."""
    whole = spec.pooling is not None and not spec.pooling.takes_chunks
    apart = whole or spec.prefix_refusal is not None or spec.keys_vary(length)
    return config.enable_prefix_caching and not apart


def _limits(config: EngineConfig, spec: ModelSpec, platform: str) -> Limits:
    """Requests and chunk tokens of a step, and the longest sequence. Raises ConfigError."""
    slots = config.max_num_seqs or (16 if platform == "cpu" else 256)
    length = model_length(config, spec)
    usual = min(length, 512) if platform == "cpu" else 8192
    usual = min(usual, BATCH_INVARIANT_TOKENS) if config.batch_invariant else usual
    role = (config.kv_transfer_config or {}).get("kv_role")
    usual = min(usual, PRODUCER_TOKENS) if role == "kv_producer" else usual
    whole = spec.pooling is not None and not spec.pooling.takes_chunks
    tokens = config.max_num_batched_tokens or max(usual, slots, length if whole else 0)
    if whole and tokens < length:
        raise ConfigError(
            f"--max-num-batched-tokens ({tokens}) must be at least --max-model-len ({length}), "
            "since this model pools all tokens of a prompt and computes it in one step"
        )
    if tokens < slots:
        raise ConfigError(
            f"--max-num-batched-tokens ({tokens}) must be at least --max-num-seqs ({slots}), "
            "since every running request may decode a token"
        )
    return Limits(max_num_seqs=slots, max_num_batched_tokens=tokens, max_model_len=length)


def _cache(config: EngineConfig, model: _Model, limits: Limits) -> tuple[KVRequirements, HostPlan]:
    """What the pools must serve, and pages in host memory. Raises ConfigError."""
    spec, length = model.spec, limits.max_model_len
    shards = layer_devices(model.mesh)

    def layer_bytes(cache: AttentionCache) -> int:
        return page_bytes(cache, shards, model.page_size, model.kv_dtype) // shards

    caching, room = _shares_prefixes(config, spec, length), HostRoom.measure(model.platform)
    _check_moves(config, spec)
    pipeline = stages(config.pipeline_parallel_size)
    divided = [stage.layers(len(spec.layers)) for stage in pipeline]
    every = model_groups(replace(spec, pooling=None), length, keeps_all=True)
    whole = page_sizes(every, divided, layer_bytes)
    host = plan_host(config, sum(whole), shards * len(pipeline), caching, room)
    if spec.pooling is not None and host.pages:
        raise ConfigError(
            "a pooling model moves no pages to host memory; leave out --kv-offloading-size and "
            "--preemption-mode swap"
        )
    groups = model_groups(spec, length, keeps_all=host.pages > 0)
    need = KVRequirements(
        page_bytes=page_sizes(groups, divided, layer_bytes),
        page_size=model.page_size,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=length,
        step_tokens=limits.max_num_batched_tokens,
        groups=tuple(group for group in groups if group.spec.has_pages),
        tile=tile_tokens(model.backend.name),
        splits=splits(spec, shards),
    )
    return need, host


def _check_moves(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError where pages are to leave the device of a model that allows it not."""
    flags = {
        "--kv-transfer-config": config.kv_transfer_config is not None,
        "--kv-offloading-size": bool(config.kv_offloading_size),
        "--preemption-mode swap": config.preemption_mode == "swap",
    }
    asked = [flag for flag, given in flags.items() if given]
    if asked and spec.move_refusal is not None:
        raise ConfigError(f"{asked[0]}: {spec.move_refusal}; leave it out")


def _kv_dtype(config: EngineConfig, spec: ModelSpec, dtype: jnp.dtype) -> jnp.dtype:
    """The pages' dtype: 8 bits as the user or the checkpoint wishes, else the model's `dtype`."""
    wish = spec.kv_cache_dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    found = jnp.dtype(KV_CACHE_DTYPES[wish] or dtype)
    if found != dtype and found.itemsize > 1:
        raise ConfigError(
            f"--kv-cache-dtype {wish} is neither of 8 bits nor what the model computes in; "
            f"give {dtype}, fp8 or auto, or --dtype {wish}"
        )
    if found != dtype and spec.rounding_refusal is not None:
        raise ConfigError(f"--kv-cache-dtype {wish}: {spec.rounding_refusal}; give {dtype}")
    return found


def check_same(hosts: Hosts, resolved: Resolved) -> None:
    """Raise ConfigError unless all hosts decided the same."""
    decided = asdict(resolved) | {"model_dir": ""}
    own, *others = hosts.agree({name: json.dumps(x, default=repr) for name, x in decided.items()})
    for rank, other in enumerate(others, 1):
        if (found := difference(own, other)) is not None:
            raise ConfigError(
                f"host {rank} decided otherwise: {found.replace(' here ', ' there ')}; "
                "use machines of one kind"
            )
