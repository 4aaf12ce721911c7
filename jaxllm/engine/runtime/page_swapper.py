"""KV pages to host memory and back, beside the steps. A program gathers or scatters a few pages of
all layers; a copy crosses the link."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from itertools import batched
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jaxllm.cache.arrays import KVCache, page_counts
from jaxllm.cache.transfer import Page, page_shapes
from jaxllm.config import ConfigError
from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.runtime.launch import HostBuffers, fill
from jaxllm.engine.runtime.program import Key, shardings
from jaxllm.engine.scheduling.kv_offload import Link
from jaxllm.engine.scheduling.plan import Moves, Traffic
from jaxllm.mesh import PINNED, is_pinned, lacks_memory
from jaxllm.units import amount

logger = logging.getLogger("jaxllm")

LEAVING = 2  # calls of `save_pages` whose copies may be in flight at once
# Calls of `load_pages` in one plan: a link of 25 GB/s brings as many pages beside a step of 5 ms
PLAN_LOADS = 4
# Calls of `save_pages` whose copies for other engines may be in flight at once: those of two steps
# of 2,048 tokens of an 8B. With fewer, the launch of a step would wait until the pages of the one
# before have left, and these would be exported later
TAKEN = 16
# A program reads its page numbers when it runs: one buffer for each that may not have run, and one
BUFFERS = LEAVING + TAKEN + PLAN_LOADS + 1
# The remedy for too little host memory
GIVE_MEMORY = "lower --swap-space or --kv-offloading-size, or give the process more memory"
RUNS = 3  # of each measurement; the last counts, when XLA has recorded the program
NO_ROOM = f"no host memory for KV pages, which will be computed again; {GIVE_MEMORY}"
NO_COPY = "KV pages could not be copied to host memory and will be computed again"
NO_PAGES = "a program that moves KV pages failed on the device"


def far_memory(platform: str) -> str | None:
    """Kind of memory for pages that leave a device: pinned, which the device accesses directly; on
    CPU the usual one."""
    if platform == "cpu":
        return None
    return PINNED


class _Trip(NamedTuple):
    """Copies in flight.

    Attributes:
        copies: the arrays to wait for.
        leaving: pages that leave the device, by their place in host memory.
    """

    copies: Any
    leaving: dict[int, Page]


class PageSwapper:
    """Owns the copies in host memory, pinned where possible; each page is arrays of its own. `run`
    waits for no step, only for its own copies when many are in flight.

    Memory may run out when a copy is requested, or only when it is made. So the device keeps a page
    until its copy is complete, and earlier fetches take the page from the device. A failed copy is
    never read. After a failure the device drops the page, unless the current plan fetches it. Ask
    for `lost` places before the next plan is made.
    """

    def __init__(self, programs: Programs, traffic: Traffic):
        self._programs = programs
        self._traffic = traffic
        shapes = programs.shapes
        (self._pages,) = page_counts(shapes.kv)
        self._width = shapes.moved_pages
        page = page_shapes(shapes.kv)
        self._near = shardings(page)
        self._far = shardings(page_shapes(shapes.kv, far_memory(shapes.platform)))
        self._filler = shapes.zeros(page)
        self._number_buffers = HostBuffers(self._width, shapes.host, BUFFERS)
        # Apart from each other: transfers of one plan run behind the step before it, and a wait
        # for them would delay the next launch
        self._out: deque[_Trip] = deque()
        self._in: deque[_Trip] = deque()
        self._taken: deque[_Trip] = deque()
        # Kinds of failure with the text of their first error; each is logged once
        self._failures: dict[str, str] = {}
        # Pages in host memory without contents, for `made`; with those that are kept never more
        # than were kept at once
        self._blank: list[Page] = []
        # Places that the current plan is about to fetch
        self._wanted: frozenset[int] = frozenset()
        self._lost: set[int] = set()  # places without a copy, not reported yet
        # By place in host memory:
        self._kept: dict[int, Page] = {}
        self._leaving: dict[int, Page] = {}  # on the device, until their copies are there
        self._fetched: dict[int, Page] = {}  # on the device, by the last plan that moved such
        self._reading: dict[int, Page] = {}  # the same, by any plan, until they are there

    @property
    def traffic(self) -> Traffic:
        """Pages moved so far; waits for nothing."""
        self._poll()
        return self._traffic

    def lost(self) -> list[int]:
        """Places whose saves failed, each reported once; no later plan may fetch from them. Waits
        for nothing."""
        self._poll()
        lost = sorted(self._lost)
        self._lost = set()
        return lost

    def fetches_done(self) -> bool:
        """Whether the device has what was fetched; waits for nothing."""
        return is_there(self._fetched)

    def run(self, kv: KVCache, moves: Moves) -> KVCache:
        """Run a plan's transfers, before its step and plan by plan. Returns the pool, in the same
        buffers."""
        self._wanted = frozenset(moves.fetches)
        for batch in batched(moves.saves, self._width):
            kv = self._save(kv, batch)
        fetched = {place: self._leaving.get(place) or self._kept[place] for place in moves.fetches}
        self._wanted = frozenset()
        for place in self._lost:
            self._leaving.pop(place, None)
        if fetched:
            fetched = jax.device_put(fetched, dict.fromkeys(fetched, self._near))
        else:
            fetched = {}
        known = self._fetched | fetched
        for batch in batched(moves.puts, self._width):
            kv = self._put(kv, [known[place] for place, _ in batch], [page for _, page in batch])
        if moves.fetches or moves.puts:
            self._fetched = fetched
        reading = self._reading | fetched
        self._reading = {place: page for place, page in reading.items() if not is_there(page)}
        self._traffic.loaded += len(moves.puts)
        return kv

    def drop(self, places: Sequence[int]) -> None:
        """Give back the host memory of places whose contents are not needed any more."""
        self._poll()  # what has left is not leaving any more
        for place in places:
            leaving = self._leaving.pop(place, None)
            self._lost.discard(place)
            page = self._kept.pop(place, None)
            # What the device neither writes nor reads any more
            if page is not None and not leaving and is_there(self._reading.get(place, ())):
                self.give_back(page)

    def keep(self, place: int, page: Page) -> None:
        """Keep a page that was made elsewhere, in host memory, at a place without contents."""
        self.drop([place])
        self._kept[place] = page

    def made(self, parts: Sequence[np.ndarray]) -> Page:
        """A page in host memory with these contents. Any thread may call it.

        The processor writes pinned memory once; XLA would copy there twice, in one thread.
        """
        if not is_pinned(self._far[0]):
            # A CPU's arrays may lie in what they are made of
            copies = jax.device_put(tuple(part.copy() for part in parts), self._far)
            return jax.block_until_ready(copies)
        try:
            page = self._blank.pop()
        except IndexError:
            page = self._to_host((self._filler,))[0]
        for array, part in zip(page, parts, strict=True):
            fill(array, part)
        return page

    def give_back(self, page: Page) -> None:
        """Use the memory of a page of `made` again, which nobody keeps or reads."""
        if is_pinned(self._far[0]):  # else `made` takes none
            self._blank.append(page)

    def prepare(self, count: int) -> None:
        """Have memory for so many calls of `made`, which else has the device provide it."""
        if is_pinned(self._far[0]):
            self._blank += [self._to_host((self._filler,))[0] for _ in range(count)]

    def take_out(self, kv: KVCache, pages: Sequence[int]) -> tuple[KVCache, list[Page]]:
        """The pool and copies of pages, on their way to host memory; what is launched later does
        not change them. Waits when many are on their way."""
        taken: list[Page] = []
        for batch in batched(pages, self._width):
            kv, found = self._programs.get(Key("save_pages", (self._width,)))(
                kv, self._numbers([*batch])
            )
            copies = self._to_host(found[: len(batch)])
            self._track(self._taken, TAKEN, _Trip(copies, {}))
            taken += copies
        return kv, taken

    def warm_up(self, kv: KVCache) -> tuple[KVCache, Link]:
        """Run both programs on unused pages: until they are recorded, then to measure many pages
        and one page. Returns the pool and the measured link. Raises ConfigError when the host
        lacks memory, and any other error as it is."""
        pages = [(self._pages + i, i) for i in range(self._width)]
        for _ in range(RUNS):
            kv = self._save(kv, pages)
            while self._out:
                self._arrive(self._out)
            if self._failures:
                if NO_ROOM not in self._failures:
                    raise RuntimeError("; ".join(map(": ".join, self._failures.items())))
                size = self._width * sum(array.nbytes for array in self._filler)
                raise ConfigError(
                    f"the host has no {amount(size)} for the {self._width} KV pages that move at "
                    f"once; {GIVE_MEMORY}"
                )
            kv, full = self._timed(kv, self._width)
        for _ in range(RUNS):
            kv, one = self._timed(kv, 1)
        self._kept = {}
        self._fetched = {}
        self._traffic.saved = self._traffic.loaded = 0
        return kv, Link.measured(self._width, one, full)

    def _timed(self, kv: KVCache, count: int) -> tuple[KVCache, float]:
        """Seconds to fetch and put `count` of the kept pages."""
        start = time.perf_counter()
        kv = self.run(
            kv, Moves((), tuple(range(count)), tuple((i, self._pages + i) for i in range(count)))
        )
        jax.block_until_ready(kv)
        return kv, time.perf_counter() - start

    def _save(self, kv: KVCache, batch: Sequence[tuple[int, int]]) -> KVCache:
        kv, pages = self._programs.get(Key("save_pages", (self._width,)))(
            kv, self._numbers([page for page, _ in batch])
        )
        places = [place for _, place in batch]
        leaving = dict(zip(places, pages, strict=False))
        self._leaving |= leaving
        self._lost.difference_update(places)
        try:
            copies = self._to_host(pages[: len(batch)])
        except jax.errors.JaxRuntimeError as error:
            if not lacks_memory(error):
                raise
            self._drop_copies(leaving, NO_ROOM, error)
            self._track(self._out, LEAVING, _Trip(pages[: len(batch)], {}))
        else:
            self._kept |= dict(zip(places, copies, strict=True))
            del self._blank[: len(copies)]
            self._track(self._out, LEAVING, _Trip(copies, leaving))
        return kv

    def _to_host(self, pages: tuple[Page, ...]) -> tuple[Page, ...]:
        return jax.device_put(pages, (self._far,) * len(pages))

    def _drop_copies(
        self, pages: dict[int, Page], why: str, error: jax.errors.JaxRuntimeError
    ) -> None:
        """Record that these pages did not reach host memory. Places that were saved to again since
        do not count."""
        if why not in self._failures:
            self._failures[why] = str(error)  # not the error, whose traceback would hold the pages
            logger.warning("%s: %s", why, self._failures[why])
        for place in self._newest(pages):
            self._lost.add(place)
            self._kept.pop(place, None)
            if place not in self._wanted:
                del self._leaving[place]

    def _newest(self, pages: dict[int, Page]) -> list[int]:
        return [place for place, page in pages.items() if self._leaving.get(place) is page]

    def _put(self, kv: KVCache, pages: list[Page], numbers: list[int]) -> KVCache:
        padded = (*pages, *(self._filler for _ in range(self._width - len(pages))))
        kv, done = self._programs.get(Key("load_pages", (self._width,)))(
            kv, self._numbers(numbers), padded
        )
        self._track(self._in, PLAN_LOADS, _Trip(done, {}))
        return kv

    def _numbers(self, pages: list[int]) -> Array:
        """Page numbers for a program, padded with distinct numbers beyond the pool."""
        spare = range(self._pages + self._width, self._pages + 2 * self._width - len(pages))
        return self._number_buffers.send(np.array([*pages, *spare], np.int32))

    def _track(self, queue: deque[_Trip], most: int, trip: _Trip) -> None:
        queue.append(trip)
        if len(queue) > most:
            self._arrive(queue)

    def _poll(self) -> None:
        for queue in (self._out, self._in, self._taken):
            while queue and is_there(queue[0].copies):
                self._arrive(queue)

    def _arrive(self, queue: deque[_Trip]) -> None:
        """Wait for the oldest copies in flight. A failure costs only their pages; if the device
        itself failed, collecting a step raises."""
        trip = queue.popleft()
        if (error := _error_of(trip.copies)) is not None:
            copied = NO_ROOM if lacks_memory(error) else NO_COPY
            self._drop_copies(
                trip.leaving,
                copied if trip.leaving and _error_of(trip.leaving) is None else NO_PAGES,
                error,
            )
            return
        self._traffic.saved += len(trip.leaving)
        for place in self._newest(trip.leaving):
            del self._leaving[place]


def is_there(arrays: Any) -> bool:
    """Whether these arrays are made; waits for nothing."""
    return all(array.is_ready() for array in jax.tree.leaves(arrays))


def _error_of(arrays: Any) -> jax.errors.JaxRuntimeError | None:
    """The error with which these arrays were made, if any; waits for them."""
    try:
        jax.block_until_ready(arrays)
    except jax.errors.JaxRuntimeError as error:
        return error
    return None
