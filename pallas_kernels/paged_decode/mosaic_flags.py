"""Flags in device memory between the thread blocks of one kernel.

One block raises a flag, another awaits and lowers it. A flag is one int32 of a buffer that the call
aliases to an output (`backends.open_plan`). It is zero before the call and zero after it, so the
next call can take the same buffer as it is.
"""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

PROXY_FENCE = "fence.proxy.async;"  # orders plain accesses against those of the copy engine


def raise_flag(flag: Any) -> None:
    """Add one to a flag. Earlier writes of this warpgroup are then visible to the block that awaits
    the flag; its copies to device memory must have been waited for."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_: Any, ref: Any) -> None:
        mgpu.utils.inline_ptx(PROXY_FENCE, has_side_effects=True)
        mgpu.warpgroup_barrier()
        mgpu.SemaphoreRef(mgpu.utils.memref_ptr(ref)).signal(1, memory_scope="gpu")

    add(flag)


def await_flag(flag: Any, count: Array) -> None:
    """Wait until the flag is `count` (at least 1), and set it to zero."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def wait(_: Any, ref: Any, value: Any) -> None:
        mgpu.SemaphoreRef(mgpu.utils.memref_ptr(ref)).wait(
            value.registers.item(), memory_scope="gpu"
        )
        mgpu.utils.inline_ptx(PROXY_FENCE, has_side_effects=True)

    wait(flag, count)
