"""Host memory for KV pages, pinned while the engine starts.

XLA's client pins host memory when an array does not fit what it has: a region at a time, twice as
large as the last, which it keeps. That takes 0.6 s a GiB, for which a step would wait, and up to
twice the memory needed. An array of 2^k bytes, larger than any before, makes a region of exactly
that size; when the array is deleted, pages fit there. Each device has regions of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxllm.cache.transfer import page_shapes
from jaxllm.engine.runtime.lattice import Progress
from jaxllm.engine.runtime.page_swapper import GIVE_MEMORY
from jaxllm.engine.startup.budget import shard_bytes
from jaxllm.engine.startup.host_memory import OTHERS, HostRoom
from jaxllm.engine.startup.lattice import plan_lattice
from jaxllm.engine.startup.memory_plan import MemoryPlan
from jaxllm.engine.startup.model_plan import ModelPlan
from jaxllm.engine.startup.report import Report
from jaxllm.mesh import PINNED, stages
from jaxllm.units import amount

logger = logging.getLogger("jaxllm")

PHASE = "Pinning host memory"
PLATFORMS = ("gpu",)  # whose pages lie in memory that takes long to pin
UNIT = 2**28  # bytes of the smallest region, unless less is pinned in all
GRAIN = 256  # bytes; every array takes a multiple of them
# Arrays of different sizes fragment free memory: one part of 16 more
UNEVEN = 16


@dataclass(frozen=True)
class Wanted:
    """Memory to pin for each device.

    Attributes:
        pages: that host memory keeps.
        moving: pages on their way; a copy comes before the one that it replaces goes.
        page: bytes of a page.
        devices: each gets regions of its own.
    """

    pages: int
    moving: int
    page: int
    devices: tuple[jax.Device, ...]

    @staticmethod
    def of(model: ModelPlan, memory: MemoryPlan) -> Wanted:
        """The memory that an engine asks for on this process's devices, of all stages: each has as
        much as the first one, which has the most layers."""
        first = replace(model, stage=stages(model.stage.count)[0])
        shapes = page_shapes(plan_lattice(first, memory).pages())
        page = page_of([shard_bytes([shape]) for shape in shapes])
        return Wanted(model.host.pages, model.host.staged, page, tuple(model.own_devices))

    def regions(self, room: int) -> list[int]:
        """Sizes for each device, ascending powers of two.

        Each holds whole pages; together they hold all pages and little more, within `room`, the
        bytes that the host has for all devices.
        """
        pages = self.pages + self.moving
        unit = min(UNIT, 1 << (pages * self.page - 1).bit_length())
        size = -(-pages * self.page // unit) * unit
        while sum(region // self.page for region in powers(size)) < pages:
            size += unit
        return powers(min(size, room // len(self.devices) // unit * unit))


@dataclass
class Pinning:
    """Pins memory in a thread of the start.

    Attributes:
        size: bytes pinned so far.
        stop: set to pin no further region.
    """

    size: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def pin_wanted(self, wanted: Wanted, report: Report) -> None:
        """Pin as much as the host has. Where that is too little, the log says so, and the engine
        runs without."""
        regions = wanted.regions(room_now())
        trouble = ""
        with report.phase(PHASE) as progress:
            try:
                self.pin(regions, wanted.devices, progress)
            except (jax.errors.JaxRuntimeError, MemoryError) as error:
                trouble = f" ({error})"
        # Pages on their way may find room where others are not yet
        asked = wanted.pages * wanted.page * len(wanted.devices)
        if self.size < asked and not self.stop.is_set():
            logger.warning(
                "of %s of host memory for KV pages, %s could be pinned at start%s; the rest is "
                "pinned while requests run, which wait for it, if there is more by then; %s",
                *(amount(asked), amount(self.size, down=True), trouble, GIVE_MEMORY),
            )

    def pin(
        self, regions: Sequence[int], devices: Sequence[jax.Device], progress: Progress
    ) -> None:
        """Pin regions of these sizes for each device, in order, until `stop` is set or the next
        does not fit. Raises JAX's error when one cannot be pinned."""
        source = np.zeros(max(regions, default=0), np.uint8)  # never written, so it takes no memory
        # All of them until the end, or one would lie where the one before was
        held: list[jax.Array] = []
        for region in regions:
            for device in devices:
                if self.stop.is_set() or region > room_now():
                    return
                held.append(
                    jax.device_put(
                        source[:region], SingleDeviceSharding(device, memory_kind=PINNED)
                    )
                )
                jax.block_until_ready(held[-1])
                self.size += region
                progress(self.size, sum(regions) * len(devices))

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Rows of the start-up table."""
        if self.size:
            return [("host memory pinned", amount(self.size))]
        return []


@contextmanager
def pinning(model: ModelPlan, memory: MemoryPlan, report: Report) -> Iterator[Pinning]:
    """Pin host memory for pages of this process's devices, if any are planned, beside the `with`
    block, and finish with it. If the block fails, no further region is started. The size of the
    pools does not matter."""
    pinned = Pinning()
    if not model.host.pages or model.own_devices[0].platform not in PLATFORMS:
        yield pinned
        return
    with ThreadPoolExecutor(1, thread_name_prefix="pin") as pool:
        work = pool.submit(pinned.pin_wanted, Wanted.of(model, memory), report)
        try:
            yield pinned
            work.result()
        except BaseException:
            pinned.stop.set()
            raise


def page_of(arrays: Sequence[int]) -> int:
    """Bytes that a page of arrays of these sizes takes."""
    sizes = [-(-size // GRAIN) * GRAIN for size in arrays]
    return sum(sizes) + (sum(sizes) // UNEVEN if len(set(sizes)) > 1 else 0)


def powers(size: int) -> list[int]:
    """The powers of two that sum up to `size`, ascending."""
    return [1 << i for i in range(size.bit_length()) if size >> i & 1]


def room_now() -> int:
    """Bytes of host memory that may be pinned. Half of what others have is for pages on their
    way."""
    return HostRoom.measure("gpu").size + OTHERS // 2
