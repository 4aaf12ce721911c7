"""Owns everything on the device: weights, KV pages, what programs leave for each other. Dispatches
launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array

from jaxllm.cache.arrays import KVCache
from jaxllm.cache.peers import Inboxes
from jaxllm.commands import Sleep, WakeUp
from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.runtime.launch import HostBuffers, Launch, begin_read
from jaxllm.engine.runtime.page_swapper import PageSwapper
from jaxllm.engine.runtime.program import KV, PEERS, DeviceArrays, Key, Resident
from jaxllm.engine.runtime.programs import PROGRAMS
from jaxllm.engine.runtime.replay import Command, Reset
from jaxllm.engine.scheduling.kv_offload import Link
from jaxllm.engine.scheduling.plan import Moves, Traffic
from jaxllm.mesh import LAYER, PINNED

# XLA runs a program's kernels one by one, then records them, then replays the recording
RECORDING_RUNS = 3


type Call = tuple[Key, np.ndarray | None]


class StagesBefore(Protocol):
    """The stages before the last one, as the dispatcher of the last one sees them: they do their
    part of everything first."""

    def catch_up(self, group: int) -> None:
        """Let stages of this process know the tokens of a group's last step, before its next."""

    def news(self, group: int) -> tuple[Call, ...]:
        """What others have yet to learn of a group's last step, as part of its next launch. Waits
        for it."""

    def drawn(self, group: int, tokens: Array) -> None:
        """A step of this group has drawn `tokens`, [2, Q] as `advance` takes them."""

    def inputs(
        self, key: Key, buffer: np.ndarray | None, last: Dispatcher
    ) -> tuple[Array, ...] | None:
        """Run a program on these stages, if it concerns them. Returns what it takes on the last
        stage, or None where it does not run there."""

    def move(self, moves: Moves) -> None:
        """Move what these layers have of the pages."""

    def lost(self) -> list[int]:
        """As of `PageSwapper`."""

    def fetches_done(self) -> bool:
        """As of `PageSwapper`."""

    def warm_up(self) -> list[Link]:
        """Run the programs that no step of the last stage runs; returns the links to host memory
        as measured."""

    def sleep(self, level: int) -> None:
        """Free everything on the devices; level 1 keeps the weights in host memory."""

    def release(self, *, keep_pages: bool) -> tuple[Array, ...]:
        """Free everything but the weights, one stage's after another's."""

    def wake_up(self, weights: tuple[Array, ...] | None) -> tuple[Array, ...] | None:
        """Be as after the start; returns the weights of the last stage, if any are given."""

    def reset(self) -> None:
        """Slot state and pages anew after a step that failed."""


class NoStages:
    """`StagesBefore` of a model whose layers are on the same devices."""

    def catch_up(self, group: int) -> None:
        """Nobody has to."""

    def news(self, group: int) -> tuple[Call, ...]:
        """None."""
        return ()

    def drawn(self, group: int, tokens: Array) -> None:
        """The slots of the same devices have them."""

    def inputs(
        self, key: Key, buffer: np.ndarray | None, last: Dispatcher
    ) -> tuple[Array, ...] | None:
        """What the host brings."""
        return last.sent(key, buffer)

    def move(self, moves: Moves) -> None:
        """No other pages."""

    def lost(self) -> list[int]:
        """No other pages."""
        return []

    def fetches_done(self) -> bool:
        """No other pages."""
        return True

    def warm_up(self) -> list[Link]:
        """No other programs."""
        return []

    def sleep(self, level: int) -> None:
        """No other devices."""

    def release(self, *, keep_pages: bool) -> tuple[Array, ...]:
        """No other weights."""
        return ()

    def wake_up(self, weights: tuple[Array, ...] | None) -> tuple[Array, ...] | None:
        """All weights are those of the last stage."""
        return weights

    def reset(self) -> None:
        """No other state."""


class Dispatcher:
    """Runs programs by key. A subclass says which, and calls `_start_empty` when it is made. The
    stages `before` its own do their part first.

    Attributes:
        tell: called with each command before it is carried out, so that other hosts do the same.
        leave: called at the end of an engine that was told to end, so that other hosts end too.
        swapper: what moves pages to host memory and back; None where host memory holds none.
    """

    tell: Callable[[Command], None]
    leave: Callable[[], None]

    def __init__(
        self,
        programs: Programs,
        weights: tuple[Array, ...],
        kv: KVCache,
        before: StagesBefore | None = None,
    ):
        self.programs = programs
        self.weights = weights
        self.before = NoStages() if before is None else before
        self.tell = lambda command: None
        self.leave = lambda: None
        self._places = [weight.sharding for weight in weights]
        self.shapes = programs.shapes
        self.compiles = programs.executables.compiles
        # Executable, arguments and results of each program that has run
        self._bound: dict[Key, tuple[jax.stages.Compiled, tuple[Any, ...], tuple[Any, ...]]] = {}
        model = self.shapes.model
        if model.peers is None:
            self._inboxes = None
        else:
            self._inboxes = Inboxes(model.mesh, LAYER, model.peers)
        self._traffic = Traffic()
        # The host then reads results in place
        self._results_pinned = self.shapes.host.memory_kind == PINNED

    @property
    def kv(self) -> KVCache:
        """The page pools."""
        return self._device.read(KV)

    @kv.setter
    def kv(self, kv: KVCache) -> None:
        self._device.write(KV, kv)

    @property
    def num_weights(self) -> int:
        """How many arrays the weights are, asleep too."""
        return len(self._places)

    @property
    def traffic(self) -> Traffic:
        """Pages moved between the pool and host memory so far."""
        if self.swapper is None:
            return self._traffic
        return self.swapper.traffic

    def move(self, moves: Moves) -> None:
        """Run a plan's transfers between pool and host memory, before its forward."""
        assert self.swapper is not None, "an engine without host pages moves none"
        self.tell(moves)
        self.before.move(moves)
        self.kv = self.swapper.run(self.kv, moves)

    def lost(self) -> list[int]:
        """As of `PageSwapper`: a page is lost with one stage's part of it."""
        before = self.before.lost()
        if self.swapper is not None:
            own = self.swapper.lost()
        else:
            own = []
        if before:
            return sorted({*own, *before})
        return own

    def fetches_done(self) -> bool:
        """As of `PageSwapper`."""
        done = self.swapper is None or self.swapper.fetches_done()
        return done and self.before.fetches_done()

    def run(self, launch: Launch) -> list[Array]:
        """Dispatch programs in order; returns their results, on their way to the host."""
        self.tell(launch)
        results: list[Array] = []
        for key, buffer in launch.calls:
            results += self.dispatch(key, buffer)
        if not self._results_pinned:
            for result in results:
                begin_read(result)
        return results

    def dispatch(self, key: Key, buffer: np.ndarray | None) -> list[Array]:
        """Dispatch one program of a launch; returns its results."""
        inputs = self.before.inputs(key, buffer, self)
        if inputs is None:
            return []
        found = self.call(key, *inputs)
        if PROGRAMS[key.program].acknowledges:
            self._buffers[key].until(found.pop())
        return found

    def sent(self, key: Key, buffer: np.ndarray | None) -> tuple[Array, ...]:
        """The buffer of a program as the device gets it; () where it takes none."""
        if buffer is None:
            return ()
        return (self._buffers[key].send(buffer),)

    def call(self, key: Key, *inputs: Any) -> list[Any]:
        """Dispatch one program. `inputs` are its arguments that do not stay on the device; returns
        the results that do not."""
        bound = self._bound.get(key)
        if bound is None:
            variant = self.programs.variant(key)
            bound = self._bound[key] = self.programs.get(key), variant.takes, variant.gives
        program, takes, gives = bound
        read = self._device.read
        write = self._device.write
        given = iter(inputs)
        results = program(*[read(x) if type(x) is Resident else next(given) for x in takes])
        found = []
        for at, result in zip(gives, results if len(gives) > 1 else (results,), strict=True):
            if type(at) is Resident:
                write(at, result)
            else:
                found.append(result)
        return found

    def reset(self) -> None:
        """Slot state and pages anew after a step that failed: donated buffers may be gone, pages
        half written, and inboxes half read."""
        self.tell(Reset())
        self.before.reset()
        if self._inboxes is not None:
            self._device.wait()  # what runs may yet store into a peer's inbox
            self._inboxes.refill()
        self._device.delete()  # first: a device has no memory for two pools
        self._start_empty(self.shapes.zeros(self.shapes.kv))

    def expect_peers(self) -> None:
        """From now on devices wait for each other's parts. To be called once programs have run."""
        if self._inboxes is not None:
            self._device.wait()
            self._inboxes.refill()
            self._device.write(PEERS, self._inboxes.arrays)

    def check_peers(self) -> None:
        """Raise PeerTimeout if a device waited in vain in a step whose results were read."""
        if self._inboxes is not None:
            self._inboxes.check()

    def sleep(self, level: int) -> None:
        """Free everything on the device. The weights go to host memory at level 1, or are dropped.
        Nothing may be dispatched until `wake_up`."""
        command = Sleep(level)
        self.tell(command)
        self.before.sleep(level)
        self._device.delete()
        kept = []
        for weight, place in zip(self.weights, self._places, strict=True):
            if command.keeps_weights:  # one at a time: the host may have little room
                kept.append(jax.device_put(weight, place.with_memory_kind(PINNED)))
                kept[-1].block_until_ready()
            weight.delete()
        self.weights = tuple(kept)

    def release(self, *, keep_pages: bool) -> tuple[Array, ...]:
        """Free everything on the device but the weights and, if they are to be kept, the pages;
        give the weights to be overwritten, one stage's after another's. Nothing may be dispatched
        until `wake_up`."""
        weights = self.before.release(keep_pages=keep_pages)
        self._device.delete(keep_pages=keep_pages)
        return weights + self.weights

    def wake_up(self, weights: tuple[Array, ...] | None = None) -> None:
        """Be as after the start, with other `weights`, one stage's after another's, or those that
        were kept."""
        if weights is None:
            self.tell(WakeUp())
        weights = self.before.wake_up(weights)
        if weights is None:
            weights = tuple(map(jax.device_put, self.weights, self._places))
            jax.block_until_ready(weights)
        self.weights = weights
        # Pages that were kept hold anything, as those do that a request has given back
        self._start_empty(self._device.pages() or self.shapes.zeros(self.shapes.kv))

    def _start_empty(self, kv: KVCache) -> None:
        self._device = DeviceArrays(self.shapes, self.weights, kv)
        self._device.write(PEERS, () if self._inboxes is None else self._inboxes.arrays)
        # Host buffers too: steps that will not be collected may still read the last ones
        self._buffers: dict[Key, HostBuffers] = {}
        rings: dict[tuple[str, int], HostBuffers] = {}
        for key in self.programs.lattice:
            program = PROGRAMS[key.program]
            size = self.programs.variant(key).buffer_size
            if size:
                if (key.program, size) not in rings:
                    rings[key.program, size] = HostBuffers(
                        size, self.shapes.host, program.buffers(self.shapes)
                    )
                self._buffers[key] = rings[key.program, size]
        self.swapper = (
            PageSwapper(self.programs, self._traffic) if self.shapes.moved_pages else None
        )
