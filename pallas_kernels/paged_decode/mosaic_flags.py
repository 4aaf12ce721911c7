"""Flags in device memory between thread blocks of one kernel: raised by one, awaited and lowered by
another.

A flag is one int32 of an input array. It is zero before the kernel and zero after it, so that
nobody outside sees it change.
"""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

PROXY_FENCE = "fence.proxy.async;"  # orders plain accesses against those of the copy engine


def raise_flag(flag: Any) -> None:
    """Adds one. What this warpgroup wrote before (its copies to device memory waited for) is
    visible to who waits for the flag."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_: Any, ref: Any) -> None:
        mgpu.utils.inline_ptx(PROXY_FENCE, has_side_effects=True)
        mgpu.warpgroup_barrier()
        mgpu.SemaphoreRef(mgpu.utils.memref_ptr(ref)).signal(1, memory_scope="gpu")

    add(flag)


def await_flag(flag: Any, count: Array) -> None:
    """Waits until the flag is `count` (at least 1) and sets it to zero."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def wait(_: Any, ref: Any, value: Any) -> None:
        mgpu.SemaphoreRef(mgpu.utils.memref_ptr(ref)).wait(
            value.registers.item(), memory_scope="gpu"
        )
        mgpu.utils.inline_ptx(PROXY_FENCE, has_side_effects=True)

    wait(flag, count)
