"""Host memory for KV pages, pinned while the engine starts.

XLA's client pins host memory when an array finds no room in what it has: a region at a time, twice
as large as the last one, and keeps it. That takes 0.6 s a GiB, for which a step would wait, and in
the end up to twice what is needed. An array of 2^k bytes, larger than any before, makes a region of
just as many; when it is gone, pages find room there. Each device has regions of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxllm.cache.transfer import page_shapes
from jaxllm.engine.runtime.pinned_memory import PINNED
from jaxllm.engine.startup.host_memory import OTHERS, STAGED, HostRoom
from jaxllm.engine.startup.make_programs import abstract_pages
from jaxllm.engine.startup.memory import shard_bytes
from jaxllm.engine.startup.report import Advance, Report
from jaxllm.engine.startup.resolve import Setup
from jaxllm.units import amount

logger = logging.getLogger("jaxllm")

PHASE = "Pinning host memory"
PLATFORMS = ("gpu",)  # whose pages lie in memory that takes long to pin
UNIT = 2**28  # of what is pinned: regions are no smaller, but for less than that in all
GRAIN = 256  # bytes; every array takes a multiple of them
# Where a page is arrays of different sizes, what is free falls into pieces: one part of it more
UNEVEN = 16
REMEDY = "lower --swap-space or --kv-offloading-size, or give the process more memory"


@dataclass(frozen=True)
class Wanted:
    """What is to be pinned on behalf of each of some devices: memory for pages of so many bytes,
    those that are to lie there and those that are on their way: a copy comes before the one that it
    replaces goes."""

    pages: int
    moving: int
    page: int
    devices: tuple[jax.Device, ...]

    @staticmethod
    def of(setup: Setup) -> Wanted:
        """For what was decided."""
        resolved, page = (
            setup.resolved,
            page_of([shard_bytes([shape]) for shape in page_shapes(abstract_pages(setup))]),
        )
        return Wanted(
            resolved.host_pages, STAGED * resolved.moved_pages, page, tuple(setup.mesh.devices.flat)
        )

    def regions(self, room: int) -> list[int]:
        """Of each device, ascending powers of two: together they hold all pages, each of them whole
        ones, and little more; or as much as there is room for, in bytes on the host for all
        devices."""
        pages = self.pages + self.moving
        unit = min(UNIT, 1 << (pages * self.page - 1).bit_length())
        size = -(-pages * self.page // unit) * unit
        while sum(region // self.page for region in powers(size)) < pages:
            size += unit
        return powers(min(size, room // len(self.devices) // unit * unit))


@dataclass
class Pinning:
    """What has been pinned so far, bytes in all."""

    size: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, wanted: Wanted, report: Report) -> None:
        """Pin what there is room for; where that is less than is wanted, the log says so and the
        engine can do without."""
        regions, trouble = wanted.regions(room_now()), ""
        with report.phase(PHASE) as advance:
            try:
                self.pin(regions, wanted.devices, advance)
            except (jax.errors.JaxRuntimeError, MemoryError) as error:
                trouble = f" ({error})"
        # Pages on their way may find room where others are not yet
        asked = wanted.pages * wanted.page * len(wanted.devices)
        if self.size < asked and not self.stop.is_set():
            logger.warning(
                "of %s of host memory for KV pages, %s could be pinned at start%s; the rest is pinned while requests run, which wait for "
                "it, if there is more by then; %s",
                *(amount(asked), amount(self.size, down=True), trouble, REMEDY),
            )

    def pin(self, regions: Sequence[int], devices: Sequence[jax.Device], advance: Advance) -> None:
        """Have regions of these sizes pinned for each device, in their order, until told to stop or
        there is no room for the next. Raises what JAX does when one cannot be had."""
        source = np.zeros(max(regions, default=0), np.uint8)  # takes no memory: nobody writes to it
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
                advance(self.size, sum(regions) * len(devices))

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What the start-up table says of it."""
        return [("host memory pinned", amount(self.size))] if self.size else []


@contextmanager
def pinning(setup: Setup, report: Report) -> Iterator[Pinning]:
    """Pin host memory for pages, if there are to be any, beside what the `with` block does; it is
    done when that has ended. If that fails, no other region is begun."""
    found = Pinning()
    if not setup.resolved.host_pages or setup.mesh.devices.flat[0].platform not in PLATFORMS:
        yield found
        return
    with ThreadPoolExecutor(1, thread_name_prefix="pin") as pool:
        work = pool.submit(found.run, Wanted.of(setup), report)
        try:
            yield found
            work.result()
        except BaseException:
            found.stop.set()
            raise


def page_of(arrays: Sequence[int]) -> int:
    """Bytes that a page takes whose arrays have so many."""
    sizes = [-(-size // GRAIN) * GRAIN for size in arrays]
    return sum(sizes) + (sum(sizes) // UNEVEN if len(set(sizes)) > 1 else 0)


def powers(size: int) -> list[int]:
    """The powers of two whose sum it is, ascending."""
    return [1 << i for i in range(size.bit_length()) if size >> i & 1]


def room_now() -> int:
    """Bytes of host memory that may be pinned: half of what is left to others is for pages on their
    way."""
    return HostRoom.of("gpu").size + OTHERS // 2
