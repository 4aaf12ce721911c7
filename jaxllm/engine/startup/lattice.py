"""`Lattice`: what the step programs of one stage are made from, once the pools have their size."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm import weights
from jaxllm.cache.arrays import GroupArrays, KVCache, PagedArrays
from jaxllm.cache.groups import CacheGroup, layer_places
from jaxllm.cache.layer import RecurrentState
from jaxllm.cache.peers import by_inboxes
from jaxllm.cache.states import StateArrays
from jaxllm.config import ConfigError, Resolved
from jaxllm.engine.runtime.compilation.executables import Executables
from jaxllm.engine.runtime.compilation.exports import Exports, fingerprint
from jaxllm.engine.runtime.compilation.xla_options import XlaOptions
from jaxllm.engine.runtime.lattice import Programs, weight_leaves
from jaxllm.engine.runtime.shapes import Model, StepShapes, packed_carries
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.startup.budget import states_shape
from jaxllm.engine.startup.kv_requirements import model_groups
from jaxllm.engine.startup.limits import shares_prefixes
from jaxllm.engine.startup.memory_plan import MemoryPlan
from jaxllm.engine.startup.model_plan import ModelPlan, largest_inboxes
from jaxllm.engine.startup.program_cache import programs_folder
from jaxllm.hosts.group import Hosts, difference
from jaxllm.logprobs import most_logprobs
from jaxllm.mesh import Stage, layer_devices
from jaxllm.models import ModelSpec
from jaxllm.sampling.processor_arguments import Processor

# Decisions that change no program, or a program's name already
_DECIDED_LATER = (
    "model_dir",
    "async_scheduling",
    "enable_prefix_caching",
    "scheduling_policy",
    "max_num_queued_reqs",
    "group_pages",
    "max_model_len",
    "windows",
    "preemption_mode",
    "host_pages",
    "host_cached_pages",
    "moved_pages",
    "staged_pages",
)


@dataclass(frozen=True)
class Lattice:
    """The step programs of one stage before they are lowered. A process that has these values makes
    the same programs.

    Attributes:
        resolved: the decisions that the running engine reads.
        spec: the model, serving sequences of the length that was decided.
        mesh: the devices, in groups that have experts of their own.
        dtype: of weights and activations.
        stage: which layers these devices have.
        buckets: shapes to compile.
        asked_length: tokens of the longest sequence that was asked for.
        weight_bytes: of weights on each device, by which XLA's options are chosen.
        apart: whether other processes compile other programs at the same time.
        outline: the stage without its weights.
    """

    resolved: Resolved
    spec: ModelSpec
    mesh: Mesh
    dtype: jnp.dtype
    stage: Stage
    buckets: Buckets
    asked_length: int
    weight_bytes: int
    apart: bool
    outline: weights.Outline

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups of the whole model."""
        resolved = self.resolved
        return model_groups(self.spec, resolved.max_model_len, resolved.host_pages > 0)

    @property
    def layers(self) -> range:
        """The layers of the stage."""
        return self.stage.layers(len(self.spec.layers))

    @property
    def slots(self) -> int:
        """Usable slots: the largest decode step may have more rows than there are requests."""
        return max(self.resolved.max_num_seqs, self.buckets.decode[-1])

    @property
    def table_width(self) -> int:
        """Pages of a slot's table, of all cache groups together."""
        return len(self.resolved.windows) * self.resolved.max_pages_per_request

    @property
    def platform(self) -> str:
        """Of the devices."""
        return self.mesh.devices.flat[0].platform

    @property
    def options(self) -> XlaOptions:
        """XLA's options for this model on these devices."""
        table = XlaOptions.of(self.mesh.devices.flat[0].device_kind, self.weight_bytes)
        return replace(table, apart=self.apart)

    def pages(self) -> KVCache:
        """The arrays of all cache groups, as shapes with shardings."""
        resolved = self.resolved
        counts = iter(resolved.group_pages)
        kv_dtype = jnp.dtype(resolved.kv_dtype)
        arrays: list[GroupArrays] = []
        for group in self.groups:
            layers = len(group.among(self.layers))
            if isinstance(group.spec, RecurrentState):
                arrays.append(StateArrays.abstract(group.spec, layers, self.slots, self.mesh))
                continue
            arrays.append(
                PagedArrays.abstract(
                    group.spec, layers, next(counts), resolved.page_size, kv_dtype, self.mesh
                )
            )
        return tuple(arrays)

    def exports(self) -> Exports | None:
        """What earlier starts have kept of such programs; None where nothing can be kept."""
        folder = programs_folder()
        if folder is None:
            return None
        device = self.mesh.devices.flat[0]
        decisions = asdict(self.resolved)
        facts = {
            "model": self.spec.to_dict() | {"length": self.asked_length},
            "engine": {
                name: value for name, value in decisions.items() if name not in _DECIDED_LATER
            },
            "length": self.asked_length,
            "buckets": self.buckets.to_dict(),
            "stage": self.stage.index,
            "devices": [
                device.platform,
                device.device_kind,
                device.client.platform_version,
                dict(self.mesh.shape),
            ],
        }
        return Exports.open(folder, fingerprint(facts))


def plan_lattice(model: ModelPlan, memory: MemoryPlan) -> Lattice:
    """The programs of a stage for pools of this size."""
    length = memory.max_model_len
    spec = model.spec.serving(length)
    outline = model.outline
    if spec.ropes != model.spec.ropes:
        outline = weights.outline(spec, model.mesh, model.dtype, model.stage)
    return Lattice(
        resolved=_resolved(model, memory),
        spec=spec,
        mesh=model.mesh,
        dtype=model.dtype,
        stage=model.stage,
        buckets=model.buckets,
        asked_length=model.need.max_model_len,
        weight_bytes=model.budget.weights,
        apart=model.wishes.hosts.count > 1 < model.stage.count,
        outline=outline,
    )


def _resolved(model: ModelPlan, memory: MemoryPlan) -> Resolved:
    """What the running engine reads."""
    config = model.config
    spec = model.spec
    slots = model.limits.max_num_seqs
    return Resolved(
        model_dir=str(model.wishes.directory),
        model_type=spec.model_type,
        dtype=model.dtype.name,
        kv_dtype=model.kv_dtype.name,
        max_model_len=memory.max_model_len,
        page_size=model.page_size,
        group_pages=memory.group_pages,
        max_num_seqs=slots,
        max_num_batched_tokens=model.limits.max_num_batched_tokens,
        max_num_queued_reqs=config.max_num_queued_reqs or max(256, 8 * slots),
        vocab_size=spec.vocab_size,
        eos_ids=spec.eos_token_ids,
        tensor_parallel_size=layer_devices(model.mesh),
        expert_parallel_size=model.mesh.shape["expert"],
        max_logprobs=most_logprobs(config.max_logprobs, spec.vocab_size),
        logprobs_mode=config.logprobs_mode,
        enable_prefix_caching=shares_prefixes(config, spec, memory.max_model_len),
        async_scheduling=config.async_scheduling,
        scheduling_policy=config.scheduling_policy,
        preemption_mode=config.preemption_mode,
        host_pages=model.host.pages,
        host_cached_pages=model.host.cached,
        moved_pages=model.host.moved,
        staged_pages=model.host.staged,
        attention_backend=model.backend.name,
        attention_reason=model.backend.reason,
        windows=memory.need.windows,
        batch_invariant=config.batch_invariant,
        prefix_refusal=spec.prefix_refusal,
        pooling=spec.pooling,
        all_reduce=model.sums.all_reduce,
        all_reduce_reason=model.sums.all_reduce_reason,
        pipeline_parallel_size=config.pipeline_parallel_size,
        target=model.target,
    )


def make_programs(
    lattice: Lattice,
    executables: Executables | None = None,
    processors: tuple[Processor, ...] = (),
) -> Programs:
    """The programs of a lattice, uncompiled. By default they use what earlier starts have kept."""
    resolved = lattice.resolved
    leaves, treedef = weight_leaves(lattice.outline.state)
    peers = None
    if by_inboxes(resolved.all_reduce):
        peers = largest_inboxes(lattice.mesh, lattice.spec, lattice.buckets)
    model = Model(
        graphdef=lattice.outline.graphdef,
        treedef=treedef,
        mesh=lattice.mesh,
        backend=resolved.attention_backend,
        target=resolved.target,
        page_size=resolved.page_size,
        places=layer_places(lattice.groups, lattice.spec.layers, lattice.layers),
        processors=processors,
        batch_invariant=resolved.batch_invariant,
        peers=peers,
    )
    if executables is None:
        executables = Executables(lattice.options, lattice.exports(), lattice.platform)
    shapes = StepShapes(
        model=model,
        weights=leaves,
        kv=lattice.pages(),
        slots=lattice.slots,
        table_width=lattice.table_width,
        hidden_states=packed_carries(
            lattice.mesh, *states_shape(lattice.spec, lattice.buckets), lattice.dtype
        ),
        vocab_size=resolved.vocab_size,
        buckets=lattice.buckets,
        max_logprobs=resolved.max_logprobs,
        logprobs_mode=resolved.logprobs_mode,
        moved_pages=resolved.moved_pages,
        platform=executables.platform,
        pooling=resolved.pooling,
        stage=lattice.stage,
        hidden_width=lattice.spec.width,
    )
    return Programs(shapes, executables)


def check_same(hosts: Hosts, resolved: Resolved) -> None:
    """Raise ConfigError unless all hosts decided the same."""
    decisions = asdict(resolved) | {"model_dir": ""}
    ours, *others = hosts.agree(
        {name: json.dumps(value, default=repr) for name, value in decisions.items()}
    )
    for rank, theirs in enumerate(others, 1):
        problem = difference(ours, theirs)
        if problem is not None:
            raise ConfigError(
                f"host {rank} decided otherwise: {problem.replace(' here ', ' there ')}; "
                "use machines of one kind"
            )
