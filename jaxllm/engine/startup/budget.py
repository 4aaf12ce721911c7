"""What takes memory on a device.

The pool of KV pages gets the memory that is left after weights, the largest step, buffers that stay
and pages on their way to or from the host. `memory_plan.py` turns that into a number of pages,
`measure.py` measures the largest step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.cache.backends import HOPPER, Backend, Target
from jaxllm.cache.layer import RecurrentState
from jaxllm.cache.states import state_bytes
from jaxllm.config import EngineConfig
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.startup.device_client import limit_bytes, unused_bytes
from jaxllm.engine.startup.host_memory import available_bytes
from jaxllm.mesh import layer_devices, stages
from jaxllm.models import ModelSpec
from jaxllm.nn import mlp
from jaxllm.nn.weight import schemes
from jaxllm.sampling.process import logits_params_bytes
from jaxllm.units import GIB, amount

# XLA's memory analysis finds eight for a draw with filters in plain JAX; until a step is compiled,
# two to spare
LOGIT_COPIES = 10
# Of an accelerator: slot state, programs' constants, and what its allocator loses between buffers
SPARE = 512 * 2**20


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes on one device.

    Attributes:
        usable: what this engine may take in all.
        weights: the device's share of them.
        workspace: temporaries and outputs of the largest step.
        shared: the device uses the host's own memory.
        resident: buffers that stay, for logits and sampling.
        spare: left free.
        staged: pages on their way to or from host memory.
        packing: how the checkpoint packs the weights, which are held unpacked; None: not at all.
    """

    usable: int
    weights: int
    workspace: int
    shared: bool
    resident: int = 0
    spare: int = 0
    staged: int = 0
    packing: str | None = None

    @property
    def for_pages(self) -> int:
        """Bytes for KV pages; negative when not even the rest fits."""
        return (
            self.usable - self.weights - self.workspace - self.resident - self.spare - self.staged
        )

    @property
    def available(self) -> str:
        """How much is left and why, for messages."""
        if self.for_pages < 0:
            return f"{amount(-self.for_pages)} is lacking for the rest ({self.breakdown})"
        return f"{amount(self.for_pages, down=True)} is available ({self.breakdown})"

    @property
    def unpacked(self) -> str:
        """What weights are unpacked from, for messages."""
        if self.packing is None:
            return ""
        return f" unpacked from {self.packing}"

    @property
    def breakdown(self) -> str:
        """The sum, for messages."""
        taken = {
            f"weights{self.unpacked}": self.weights,
            "for the largest step": self.workspace,
            "for sampling": self.resident,
            "spare": self.spare,
            "for pages on their way to or from the host": self.staged,
        }
        return f"{self.usable / GIB:.2f} GiB usable" + "".join(
            f" − {size / GIB:.2f} {name}" for name, size in taken.items() if size
        )


def measure_budget(
    config: EngineConfig,
    spec: ModelSpec,
    meshes: Sequence[Mesh],
    weights: Iterable[jax.ShapeDtypeStruct],
    buckets: Buckets,
    itemsize: int,
    staged: int,
) -> MemoryBudget:
    """The budget of one device before any step is compiled.

    Args:
        meshes: of all stages, whose devices have the same budget.
        weights: shapes with shardings.
        buckets: shapes to compile.
        itemsize: bytes of an activation's element.
        staged: bytes of pages on their way to or from the host.
    """
    shards = layer_devices(meshes[-1])
    shared = meshes[-1].devices.flat[0].platform == "cpu"
    step_tokens = buckets.max_rows
    count = config.pipeline_parallel_size
    slots = buckets.decode[-1] * count
    resident = resident_bytes(buckets.logits, slots, spec.vocab_size, shards)
    resident += states_bytes(spec, count) * (slots + 1) // shards
    if count > 1:  # hidden states on their way, of each group
        resident += count * step_tokens * spec.width * itemsize
    return MemoryBudget(
        usable=usable_bytes(config, [device for mesh in meshes for device in mesh.devices.flat]),
        weights=shard_bytes(weights),
        workspace=workspace_bytes(spec, step_tokens, buckets.logits[-1], itemsize, shards),
        shared=shared,
        resident=resident + math.prod(states_shape(spec, buckets)) * itemsize,
        spare=0 if shared else SPARE,
        staged=staged,
        packing=None if spec.scheme is None or spec.formats else spec.scheme.title,
    )


def states_bytes(spec: ModelSpec, count: int) -> int:
    """Bytes of the recurrent states of one request, in the layers of the one of `count` stages that
    has most."""
    sizes = [
        state_bytes(cache) if isinstance(cache, RecurrentState) else 0 for cache in spec.layers
    ]
    return max(sum(sizes[layer] for layer in stage.layers(len(sizes))) for stage in stages(count))


def usable_bytes(config: EngineConfig, devices: Iterable[Any]) -> int:
    """Bytes that this engine may use on each device, by the one that has least: free memory within
    the accelerator client's limit, or a share of the host's free memory."""
    here = jax.process_index()  # of several hosts, each knows its own devices
    return min(_usable_bytes(config, device) for device in devices if device.process_index == here)


def _usable_bytes(config: EngineConfig, device: Any) -> int:
    share = config.gpu_memory_utilization
    if device.platform != "cpu" and limit_bytes(device, share):
        return unused_bytes(device, share)
    return int(available_bytes() * share)


def shard_bytes(leaves: Iterable[jax.ShapeDtypeStruct]) -> int:
    """Bytes of these arrays on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
        for leaf in leaves
    )


def workspace_bytes(spec: ModelSpec, tokens: int, rows: int, itemsize: int, shards: int) -> int:
    """An upper estimate for the largest step: activations of `tokens` tokens, and the copies that
    sampling makes of float32 logits of `rows` rows."""
    width = spec.width * 6 + (spec.inner_width * 4) // shards
    return tokens * width * itemsize + rows * spec.vocab_size * 4 * LOGIT_COPIES


def likely_step_bytes(
    spec: ModelSpec,
    backend: Backend,
    target: Target,
    buckets: Buckets,
    itemsize: int,
    shards: int,
) -> int | None:
    """What the largest step should need where Hopper's kernels run all of it, as weights say of
    themselves; None elsewhere. A first start compiles for it while it measures.

    It is the larger of two: a forward, which holds a stream more where it has experts, and
    log-probabilities of prompts, which hold float32 logits of the scored tokens and a quarter more.
    """
    forms = set(spec.formats.values())
    is_known = backend.is_kernel and HOPPER.met_by(target)
    if not is_known or not all(schemes.has_kernel(form, target) for form in forms):
        return None  # weights in few bits without a kernel are unpacked
    stream = spec.width
    product = spec.inner_width // shards
    width = mlp.workspace(spec.activation, stream, product)
    if spec.mixture is None:
        width = max(width, schemes.workspace(forms, stream, product))
    elif mlp.is_fused(spec.activation):
        width += stream
    return max(buckets.max_rows * width * itemsize, buckets.score * spec.vocab_size * 5)


def resident_bytes(logit_rows: Sequence[int], slots: int, vocab_size: int, shards: int) -> int:
    """Buffers that stay on one device for sampling.

    For each row count there are float32 logits, the model's and the processed ones; for each slot,
    16-bit counts of its tokens. Devices share them where the vocabulary divides. The slots'
    `LogitsParams` are on every device.
    """
    split = sum(logit_rows) * vocab_size * 4 * 2 + (slots + 1) * vocab_size * 2
    return split // (shards if vocab_size % shards == 0 else 1) + logits_params_bytes(
        slots, vocab_size
    )


def states_shape(spec: ModelSpec, buckets: Buckets) -> tuple[int, int]:
    """Shape of the carries that `extend` leaves, of every chunk token of the largest step."""
    return buckets.max_tokens, spec.carry_width
