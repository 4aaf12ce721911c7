"""Whether the devices of a mesh axis can store into each other's memory, found by trying."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.all_reduce import add_norm, inbox_backend
from pallas_kernels.all_reduce.cases import Case, expected, inputs
from pallas_kernels.all_reduce.group import Axes, size_of
from pallas_kernels.all_reduce.inboxes import Inboxes, PeerTimeout, group_of
from pallas_kernels.all_reduce.plan import MOST_DEVICES, is_one_shot, layout_for
from pallas_kernels.target import HOPPER, Target

# XLA runs, then records, then replays a program
LOADING_RUNS = 3
RUNS = 6
TOLERANCE = 0.04  # of a sum of bfloat16 near one
WIDTH = 1024


def refusal(mesh: Mesh, axis: Axes) -> str | None:
    """The reason why `mosaic_gpu_peers` cannot serve this axis; None after a trial went well."""
    devices = [*mesh.devices.flat]
    if size_of(mesh, axis) != len(devices):
        return f"the mesh has other axes than {axis!r}"
    return unsuited(devices) or no_access(devices) or failed_trial(mesh, axis)


def unsuited(devices: Sequence[Any]) -> str | None:
    """A reason that the devices' kind or number gives."""
    if not HOPPER.met_by(Target.of(devices[0])):
        return f"{devices[0].device_kind} has no kernel that stores into its peers"
    if len({device.process_index for device in devices}) > 1:
        return "the devices belong to several processes"
    if not 2 <= len(devices) <= MOST_DEVICES:
        return f"the kernel serves 2 to {MOST_DEVICES} devices, and there are {len(devices)}"
    return None


def no_access(devices: Sequence[Any], driver: Any = None) -> str | None:
    """A pair of GPUs that cannot reach each other's memory, by NVIDIA's driver."""
    try:
        driver = driver or ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"NVIDIA's driver cannot be asked for peer access ({error})"
    for a in devices:
        for b in devices:
            can = ctypes.c_int(0)
            gpu = a.local_hardware_id
            peer = b.local_hardware_id
            failed = a is not b and driver.cuDeviceCanAccessPeer(ctypes.byref(can), gpu, peer)
            if failed or (a is not b and not can.value):
                return f"GPU {gpu} has no access to the memory of GPU {peer}"
    return None


def failed_trial(mesh: Mesh, axis: Axes) -> str | None:
    """Sums of few and of many rows against float64, each several times."""
    devices = size_of(mesh, axis)
    most = trial_rows(devices)
    layout = layout_for(devices, most, 2 * WIDTH)
    inboxes = Inboxes(mesh, axis, layout)
    for rows in (3, most):
        case = Case(name="trial", rows=rows, width=WIDTH, devices=devices)
        x, parts, weight = (jnp.asarray(a, jnp.bfloat16) for a in inputs(case))
        wanted = expected(case, *(np.asarray(a, np.float64) for a in (x, parts, weight)))
        operands = [
            jax.device_put(array, NamedSharding(mesh, spec))
            for array, spec in ((x, P()), (parts, P(axis)), (weight, P()))
        ]
        run = _sums(mesh, axis, inboxes, case.eps)
        inboxes.expect_nobody()
        for _ in range(LOADING_RUNS):
            jax.block_until_ready(run(*operands, *inboxes.arrays))
        inboxes.refill()
        for _ in range(RUNS):
            got = jax.block_until_ready(run(*operands, *inboxes.arrays))
        try:
            inboxes.check()
        except PeerTimeout as error:
            return f"a trial failed: {error}"
        if not are_right(got, wanted):
            return f"a trial gave a wrong sum of {rows} rows"
    return None


def trial_rows(devices: int) -> int:
    """Rows of the larger trial: as few as the kernel adds up in two shots, if it does at all."""
    counts = (n for n in (64, 256, 1024) if not is_one_shot(devices, n * 2 * WIDTH))
    return next(counts, 256)


def are_right(got: Any, wanted: Sequence[np.ndarray]) -> bool:
    """Whether arrays of bfloat16 are near enough to those in float64, on every device."""
    return all(
        np.allclose(np.asarray(shard.data, np.float64), right, TOLERANCE, TOLERANCE)
        for array, right in zip(got, wanted, strict=True)
        for shard in array.addressable_shards
    )


def _sums(mesh: Mesh, axis: Axes, inboxes: Inboxes, eps: float) -> Any:
    def run(x: Any, part: Any, weight: Any, *arrays: Any) -> Any:
        group = group_of(axis, inboxes.layout, *arrays)
        return add_norm(x, part[0], weight, eps, group=group, backend=inbox_backend())

    specs = (P(), P(axis), P(), P(axis), P(axis))
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, check_vma=False)
    return jax.jit(mapped(run, out_specs=P()))
