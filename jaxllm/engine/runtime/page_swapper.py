"""Pages to host memory and back, beside the steps: a program gathers or scatters a few pages of all
layers, a copy crosses the link."""

from __future__ import annotations

import logging
import time
from collections import deque
from itertools import batched
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jaxllm.cache.kv import KVCache, zeros_of
from jaxllm.cache.transfer import Page, page_shapes
from jaxllm.config import ConfigError
from jaxllm.engine.runtime.host_buffers import HostBuffers
from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.runtime.pinned_memory import LEAVING, PINNED, PLAN_LOADS
from jaxllm.engine.runtime.program import Key, shardings
from jaxllm.engine.scheduling.kv_offload import Link
from jaxllm.engine.scheduling.plan import Moves, Traffic
from jaxllm.units import amount

logger = logging.getLogger("jaxllm")

NO_MEMORY = "RESOURCE_EXHAUSTED"  # begins XLA's error
RUNS = 3  # of what is measured, of which the last counts: XLA has recorded the program then
NO_ROOM = "no host memory for KV pages, which will be computed again; lower --swap-space or --kv-offloading-size"
NO_COPY = "KV pages could not be copied to host memory and will be computed again"
NO_PAGES = "a program that moves KV pages failed on the device"


def far_memory(platform: str) -> str | None:
    """The kind of memory for pages that leave a device: pinned, which the device copies from and to
    by itself; on CPU the usual one."""
    return None if platform == "cpu" else PINNED


class _Trip(NamedTuple):
    """Copies that may be under way, and for those that leave the device, by place in host memory,
    what they are made from."""

    copies: Any
    leaving: dict[int, Page]


class PageSwapper:
    """Owns the host's copies, each page arrays of its own in pinned memory where there is such
    memory. `run` never waits for a step, only for its own copies when many are under way.

    A copy may find no memory when it is asked for or only when it is made. So the device keeps a
    page until its copy is there, and what is wanted before is taken from the device: nothing is
    ever made from a copy that failed. Once that is known the device keeps the page no longer,
    unless the plan that is being run fetches it; the next one is made by somebody who has asked
    what is `lost`.
    """

    def __init__(self, programs: Programs, traffic: Traffic):
        self._programs, self._traffic = programs, traffic
        shapes = programs.shapes
        self._width, self._pages = shapes.moved_pages, shapes.kv.num_pages[0]
        page = page_shapes(shapes.kv)
        self._near = shardings(page)
        self._far = shardings(page_shapes(shapes.kv, far_memory(shapes.platform)))
        self._filler = zeros_of(page)
        self._uplink = HostBuffers(self._width, shapes.host, LEAVING + PLAN_LOADS + 1)
        # Apart, since what one plan saves and puts runs behind the step before: who waited for some
        # of it would launch the next step late.
        self._out: deque[_Trip] = deque()
        self._in: deque[_Trip] = deque()
        # What has failed, each said once, with the first error's words
        self._failures: dict[str, str] = {}
        # Places that the plan being run fetches, until it has
        self._wanted: frozenset[int] = frozenset()
        self._lost: set[int] = set()  # places for which there are no copies, yet to be told
        # By place in host memory:
        self._kept: dict[int, Page] = {}
        self._leaving: dict[int, Page] = {}  # on the device, until their copies are there
        self._fetched: dict[int, Page] = {}  # on the device, by the last plan

    @property
    def traffic(self) -> Traffic:
        """Counts what has arrived by now; waits for nothing."""
        self._look()
        return self._traffic

    def lost(self) -> list[int]:
        """Places that got nothing of what plans saved there, each told once. No plan may fetch from
        them: ask before one is made. Waits for nothing."""
        self._look()
        lost, self._lost = sorted(self._lost), set()
        return lost

    def run(self, kv: KVCache, moves: Moves) -> KVCache:
        """Do what a plan moves. Call it before the plan's step, plan by plan. Returns the pool,
        whose buffers stay."""
        self._wanted = frozenset(moves.fetches)
        for batch in batched(moves.saves, self._width):
            kv = self._save(kv, batch)
        fetched = {place: self._leaving.get(place) or self._kept[place] for place in moves.fetches}
        self._wanted = frozenset()
        for place in self._lost:
            self._leaving.pop(place, None)
        fetched = jax.device_put(fetched, dict.fromkeys(fetched, self._near)) if fetched else {}
        known = self._fetched | fetched
        for batch in batched(moves.puts, self._width):
            kv = self._put(kv, [known[place] for place, _ in batch], [page for _, page in batch])
        self._fetched = fetched
        self._traffic.loaded += len(moves.puts)
        return kv

    def warm_up(self, kv: KVCache) -> tuple[KVCache, Link]:
        """Run both programs on nobody's pages: until they are recorded, then to measure what many
        pages take and what one takes. Returns the pool, and what was measured. Raises ConfigError
        when the host has no memory for them, and whatever else fails."""
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
                    f"the host has no {amount(size)} for the {self._width} KV pages that move at once; lower --swap-space or "
                    "--kv-offloading-size, or give the process more memory"
                )
            kv, full = self._timed(kv, self._width)
        for _ in range(RUNS):
            kv, one = self._timed(kv, 1)
        self._kept, self._fetched = {}, {}
        self._traffic.saved = self._traffic.loaded = 0
        return kv, Link.measured(self._width, one, full)

    def _timed(self, kv: KVCache, count: int) -> tuple[KVCache, float]:
        """The seconds that fetching and putting so many pages of the kept ones take."""
        start = time.perf_counter()
        kv = self.run(
            kv, Moves((), tuple(range(count)), tuple((i, self._pages + i) for i in range(count)))
        )
        jax.block_until_ready(kv)
        return kv, time.perf_counter() - start

    def _save(
        self, kv: KVCache, batch: tuple[tuple[int, int], ...] | list[tuple[int, int]]
    ) -> KVCache:
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
            if NO_MEMORY not in str(error):
                raise
            self._lose(leaving, NO_ROOM, error)
            self._depart(self._out, LEAVING, _Trip(pages[: len(batch)], {}))
        else:
            self._kept |= dict(zip(places, copies, strict=True))
            self._depart(self._out, LEAVING, _Trip(copies, leaving))
        return kv

    def _to_host(self, pages: tuple[Page, ...]) -> tuple[Page, ...]:
        return jax.device_put(pages, (self._far,) * len(pages))

    def _lose(self, pages: dict[int, Page], why: str, error: jax.errors.JaxRuntimeError) -> None:
        """These pages have not come to host memory, of which those count over which nothing was
        saved since."""
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
        self._depart(self._in, PLAN_LOADS, _Trip(done, {}))
        return kv

    def _numbers(self, pages: list[int]) -> Array:
        """Page numbers for a program, padded with different ones beyond the pool."""
        spare = range(self._pages + self._width, self._pages + 2 * self._width - len(pages))
        return self._uplink.send(np.array([*pages, *spare], np.int32))

    def _depart(self, line: deque[_Trip], most: int, trip: _Trip) -> None:
        line.append(trip)
        if len(line) > most:
            self._arrive(line)

    def _look(self) -> None:
        for line in (self._out, self._in):
            while line and all(copy.is_ready() for copy in jax.tree.leaves(line[0].copies)):
                self._arrive(line)

    def _arrive(self, line: deque[_Trip]) -> None:
        """Wait for the oldest copies that are under way. Those that fail, for whatever reason, cost
        their pages alone: when the device failed, whoever collects a step is told."""
        trip = line.popleft()
        if (error := _error_of(trip.copies)) is not None:
            copied = NO_ROOM if NO_MEMORY in str(error) else NO_COPY
            self._lose(
                trip.leaving,
                copied if trip.leaving and _error_of(trip.leaving) is None else NO_PAGES,
                error,
            )
            return
        self._traffic.saved += len(trip.leaving)
        for place in self._newest(trip.leaving):
            del self._leaving[place]


def _error_of(arrays: Any) -> jax.errors.JaxRuntimeError | None:
    """What went wrong when these arrays were made, which is waited for."""
    try:
        jax.block_until_ready(arrays)
    except jax.errors.JaxRuntimeError as error:
        return error
    return None
