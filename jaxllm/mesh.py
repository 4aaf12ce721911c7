"""The device mesh, the one table from logical axes of arrays to mesh axes, and stages: which layers
of a model each group of devices has."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxllm.config import ConfigError

PINNED = "pinned_host"  # JAX's name of host memory that a device reads and writes directly
NO_MEMORY = "RESOURCE_EXHAUSTED"  # in XLA's errors
# The devices of a layer: all that is no expert is split over both axes as over one
LAYER = ("tensor", "expert")
# Logical axes of weights; one that maps to None is whole on every device
AXES: Mapping[str, str | tuple[str, ...] | None] = {
    "shard": LAYER,  # leading axis of fused weights that are stored shard by shard
    "heads": LAYER,
    "kv_heads": LAYER,
    "mlp": LAYER,
    "vocab": LAYER,
    "expert": "expert",  # of a mixture: every group of devices has some of the experts
    "expert_mlp": "tensor",  # the devices of such a group have a share of the width of each
    "embed": None,
    "head_dim": None,
    "batch": "data",
}


def make_mesh(tensor_parallel_size: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh ("data", "tensor", "expert") of shape (1, tensor_parallel_size, 1) over the first
    `devices`; of several hosts over as many of each.

    `devices` are all that JAX finds by default. Raises ConfigError when there are too few.
    """
    devices = jax.devices() if devices is None else list(devices)
    if tensor_parallel_size < 1:
        raise ConfigError(f"tensor_parallel_size is {tensor_parallel_size}; it must be at least 1")
    if tensor_parallel_size > len(devices):
        platform = devices[0].platform if devices else "no"
        raise ConfigError(
            f"tensor_parallel_size {tensor_parallel_size} needs {tensor_parallel_size} devices, "
            f"but there are {len(devices)} ({platform}); "
            f"set tensor_parallel_size to at most {max(1, len(devices))}"
        )
    chosen = _of_every_host(tensor_parallel_size, devices)
    grid = np.asarray(chosen, dtype=object).reshape(1, tensor_parallel_size, 1)
    return Mesh(grid, ("data", *LAYER), axis_types=(AxisType.Auto,) * 3)


def over_experts(mesh: Mesh, groups: int) -> Mesh:
    """The same devices, in so many groups that have experts of their own. `groups` divides them."""
    grid = mesh.devices.reshape(mesh.shape["data"], -1, groups)
    return Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def make_stage_meshes(
    tensor_parallel_size: int, stages: int, devices: Sequence[jax.Device] | None = None
) -> list[Mesh]:
    """A mesh of `make_mesh` for each stage of a pipeline. Raises ConfigError when there are too few
    devices."""
    devices = jax.devices() if devices is None else list(devices)
    size = tensor_parallel_size
    if stages == 1:
        return [make_mesh(size, devices)]
    chosen = _of_whole_stages(size, stages, devices)
    return [make_mesh(size, chosen[index * size :][:size]) for index in range(stages)]


def own_meshes(meshes: Sequence[Mesh]) -> dict[int, Mesh]:
    """The meshes, of those of all stages, that have devices of this process, by stage."""
    process = jax.process_index()
    return {
        stage: mesh
        for stage, mesh in enumerate(meshes)
        if any(device.process_index == process for device in mesh.devices.flat)
    }


def own_devices(meshes: Sequence[Mesh]) -> list[jax.Device]:
    """The devices of this process in these meshes."""
    process = jax.process_index()
    return [
        device for mesh in meshes for device in mesh.devices.flat if device.process_index == process
    ]


def layer_devices(mesh: Mesh) -> int:
    """Devices over which a layer is split."""
    return math.prod(mesh.shape[axis] for axis in LAYER)


def _by_host(devices: Sequence[jax.Device]) -> dict[int, list[jax.Device]]:
    """These devices by host; 0 is the controller."""
    hosts: dict[int, list[jax.Device]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device)
    return hosts


def _of_whole_stages(size: int, stages: int, devices: Sequence[jax.Device]) -> list[jax.Device]:
    """The devices of stages of this size, one stage after another: of every host the first ones,
    for as many stages. The last stages are the controller's, which reads what is drawn. Raises
    ConfigError where there are too few."""
    hosts = _by_host(devices)
    per_host = stages // len(hosts)
    fewest = min(hosts.values(), key=len)
    if per_host * size > len(fewest):
        where = "" if len(hosts) == 1 else "on one host "
        if per_host > 1:
            wish = f"{per_host} stages of {size} devices need"
        else:
            wish = f"a stage of {size} needs"
        raise ConfigError(
            f"{wish} {per_host * size} devices, but {where}there are "
            f"{len(fewest)} ({fewest[0].platform}); lower --pipeline-parallel-size or "
            "--tensor-parallel-size"
        )
    order = [*sorted(hosts.keys() - {0}), *hosts.keys() & {0}]
    return [device for host in order for device in hosts[host][: per_host * size]]


def _of_every_host(count: int, devices: Sequence[jax.Device]) -> list[jax.Device]:
    """`count` of these devices, the first of each host and as many of each. Raises ConfigError
    where that cannot be."""
    hosts = _by_host(devices)
    per_host, rest = divmod(count, len(hosts))
    fewest = min(map(len, hosts.values()))
    if rest or per_host > fewest:
        raise ConfigError(
            f"tensor_parallel_size {count} over {len(hosts)} hosts takes as many devices of each, "
            f"and one has {fewest}; set it to a multiple of {len(hosts)}, at most "
            f"{len(hosts) * fewest}"
        )
    return [device for host in sorted(hosts) for device in hosts[host][:per_host]]


def place(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A host array, the same on every host, on the devices of `sharding`. Unlike
    `jax.device_put`, it asks nothing of other hosts."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error is XLA's that there is no memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and NO_MEMORY in str(error)


def is_pinned(sharding: Any) -> bool:
    """Whether arrays of this sharding lie in pinned host memory."""
    return sharding.memory_kind == PINNED


def memory_of(array: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The memory of an array in pinned host memory, writable, once it is computed. The caller keeps
    the array."""
    array.block_until_ready()
    size = math.prod(shape) * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(memory, dtype).reshape(shape)


def sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """Where an array with these logical axes lies. Raises ValueError for an unknown axis."""
    unknown = [axis for axis in axes if axis is not None and axis not in AXES]
    if unknown:
        raise ValueError(f"unknown logical axes {unknown}; jaxllm.mesh.AXES has {sorted(AXES)}")
    names = [None if axis is None else AXES[axis] for axis in axes]
    while names and names[-1] is None:
        names.pop()
    return NamedSharding(mesh, PartitionSpec(*names))


def is_split(axis: str | None) -> bool:
    """Whether an axis of this name is split over the devices of a layer."""
    return axis is not None and AXES[axis] in (LAYER, *LAYER)


def per_device(function: Callable, mesh: Mesh, takes: Any, gives: Any) -> Callable:
    """The function of whole arrays that runs `function` on every device, over the device's own.

    Args:
        takes: trees of the arguments, of anything with a sharding.
        gives: tree of the results, likewise.

    One device owns all arrays, so its function is returned as it is.
    """
    if mesh.size == 1:
        return function
    in_specs, out_specs = (jax.tree.map(_spec, tree) for tree in (takes, gives))
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def _spec(array: Any) -> PartitionSpec:
    if isinstance(array, NamedSharding):
        where = array
    else:
        where = array.sharding
    return where.spec


@dataclass(frozen=True)
class Stage:
    """Stage `index` of `count`, in the order in which tokens pass them.

    The first embeds tokens, the last has the final norm and the output head.
    """

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it makes logits and draws."""
        return self.index == self.count - 1

    def layers(self, total: int) -> range:
        """The numbers of the stage's layers, of `total` in the model. Where the stages do not
        divide them, the earlier stages have one more, since the last one has the head."""
        share, rest = divmod(total, self.count)
        start = self.index * share + min(self.index, rest)
        return range(start, start + share + (self.index < rest))


WHOLE = Stage()


def stages(count: int) -> tuple[Stage, ...]:
    """All stages of a pipeline of so many."""
    return tuple(Stage(index, count) for index in range(count))
