"""Every executable that the engine may run, compiled before serving and looked up by key."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
from jax import Array

from jaxllm.cache.arrays import KVCache, page_counts
from jaxllm.config import ConfigError
from jaxllm.engine.runtime.compilation.compile_counter import CompileCounter
from jaxllm.engine.runtime.compilation.executables import Executables, Recipe
from jaxllm.engine.runtime.program import KV, STATE, WEIGHTS, Key, Program, Resident, Variant
from jaxllm.engine.runtime.programs import PROGRAMS
from jaxllm.engine.runtime.shapes import StepShapes
from jaxllm.engine.scheduling.buckets import ExtendShape
from jaxllm.mesh import lacks_memory

type Progress = Callable[[int, int], None]  # called with (done, total)


class Programs:
    """The lattice: programs by shape.

    `compile_all` builds it in threads, since XLA releases the GIL. A missing program is built on
    first use, which only happens with `enforce_eager`.
    """

    def __init__(self, shapes: StepShapes, executables: Executables | None = None):
        self.shapes = shapes
        self.executables = executables or Executables(platform=shapes.platform)
        self._variants: dict[Key, Variant] = {}
        self._compiled: dict[Key, jax.stages.Compiled] = {}
        self._making: dict[Key, Future[jax.stages.Compiled]] = {}
        self._late: tuple[Key, ...] = ()
        self._stopped = False

    @functools.cached_property
    def lattice(self) -> list[Key]:
        """Every key, in the order of compiling: first programs for which XLA times kernels, then
        those that take longest."""
        keys = [
            Key(program.name, tuple(sizes))
            for program in self._programs
            for sizes in program.sizes(self.shapes)
        ]
        return sorted(keys, key=lambda key: not self.is_tuned(key))

    @property
    def _programs(self) -> list[Program]:
        """Those of the model's kind, its forward of prompts first."""
        return [program for program in PROGRAMS.values() if program.runs(self.shapes)]

    def get(self, key: Key) -> jax.stages.Compiled:
        """The executable of a key; waits where another thread compiles it."""
        program = self._compiled.get(key)
        if program is None:
            return self._make(key)
        return program

    def variant(self, key: Key) -> Variant:
        """The function of a key, with the arrays that it takes and gives."""
        if key not in self._variants:
            self._variants[key] = PROGRAMS[key.program].build(self.shapes, *key.sizes)
        return self._variants[key]

    def recipe(self, key: Key) -> Recipe:
        """What to compile for a key."""
        return self.variant(key).recipe(self.shapes)

    def compile_all(self, progress: Progress | None = None) -> None:
        """Compile the whole lattice but late programs; `progress(done, total)` after each
        program."""
        self.compile([key for key in self.lattice if key not in self._late], progress)

    def leave_late(self) -> None:
        """Have `compile_all` leave out what a server can be ready without. Until they are made,
        steps take the shapes and samplers that are there. A program that has no other is made when
        a step needs it first, which then waits for it."""
        late = [k for k in self.lattice if not PROGRAMS[k.program].is_first(self.shapes, k.sizes)]
        # Behind those that a request may wait for
        self._late = tuple(sorted(late, key=lambda key: PROGRAMS[key.program].has_products))
        self.executables.late = frozenset(map(self.name, late))
        self.executables.compiles.leave_late(len(late))

    @property
    def late(self) -> tuple[Key, ...]:
        """The late programs, in the order of making them."""
        return self._late

    @property
    def missing(self) -> frozenset[Key]:
        """The late programs that are not made yet."""
        return frozenset(key for key in self._late if key not in self._compiled)

    def compile(self, keys: Iterable[Key], progress: Progress | None = None) -> None:
        """Compile the missing ones of these programs, in half as many threads as cores.

        XLA times kernels on the device. A program for which there is no memory beside others is
        tried again by itself; raises ConfigError if there is none then.
        """
        keys = [key for key in keys if key not in self._compiled]
        crowded = []
        workers = max(2, (os.cpu_count() or 2) // 2)
        with ThreadPoolExecutor(workers, thread_name_prefix="compile") as pool:
            for done, (key, made) in enumerate(
                zip(keys, pool.map(self._fits, keys), strict=True), 1
            ):
                if progress:
                    progress(done, len(keys))
                if not made:
                    crowded.append(key)
        for key in crowded:
            if not self._fits(key):
                raise ConfigError(
                    f"the device has no memory left to compile {self.name(key)} beside the "
                    "engine's share of it; lower --gpu-memory-utilization"
                )

    def stop(self) -> None:
        """Make `compile`, in other threads, start no further program."""
        self._stopped = True

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def _fits(self, key: Key) -> bool:
        """Make a program, unless stopped; whether there was memory for it."""
        try:
            if not self._stopped:
                self._make(key)
        except jax.errors.JaxRuntimeError as error:
            if not lacks_memory(error):
                raise
            return False
        return True

    def _make(self, key: Key) -> jax.stages.Compiled:
        """Compile a program once, for however many threads."""
        mine: Future[jax.stages.Compiled] = Future()
        making = self._making.setdefault(key, mine)
        if making is mine:
            try:
                self._compiled[key] = self._compile(key)
                making.set_result(self._compiled[key])
            except BaseException as error:
                del self._making[key]  # a later call tries again
                making.set_exception(error)
        return making.result()

    def _compile(self, key: Key) -> jax.stages.Compiled:
        made = self.executables.compile(
            self.name(key), self._rows(key), self.recipe(key), keep=self.is_kept(key)
        )
        if key in self._late:
            # What makes the arrays that its first run finds is no program of a step
            with CompileCounter():
                for at in self.variant(key).takes:
                    if isinstance(at, Resident) and at not in (WEIGHTS, KV, STATE):
                        self.shapes.zeros(at.shapes(self.shapes))
            self.executables.compiles.made_late()
        return made

    @property
    def largest(self) -> Key:
        """The forward that needs most memory."""
        return self._largest_of(self._programs[0])

    @property
    def largest_others(self) -> list[Key]:
        """The largest of each other program that may need more memory than a forward."""
        return [
            self._largest_of(program)
            for program in self._programs
            if program.may_need_most(self.shapes)
        ]

    def _largest_of(self, program: Program) -> Key:
        # Of steps with as many rows, one with decodes does more
        sizes = program.sizes(self.shapes)
        return Key(program.name, max(sizes, key=lambda each: (program.rows(each), each[::-1])))

    def for_pool(self, kv: KVCache, table_width: int) -> Programs:
        """The lattice for a pool of another size. Programs without pages are compiled only once if
        the slot state stays the same."""
        shapes = replace(self.shapes, kv=kv, table_width=table_width)
        other = Programs(shapes, self.executables)
        if table_width == self.shapes.table_width:
            other._compiled = {
                key: program
                for key, program in self._compiled.items()
                if not self.variant(key).uses_pages
            }
        return other

    @property
    def peak_bytes(self) -> int:
        """Bytes on one device that the compiled programs need at most beside weights, pages and
        slot state: temporaries and outputs."""
        return max(map(needed_bytes, self._compiled.values()), default=0)

    def is_kept(self, key: Key) -> bool:
        """Whether the lowered program is worth keeping for later starts."""
        return PROGRAMS[key.program].is_kept(self.shapes)

    def is_tuned(self, key: Key) -> bool:
        """Whether XLA times kernels on the device to compile the program."""
        has_products = PROGRAMS[key.program].has_products
        return has_products and self.executables.tunes(key.program, self._rows(key))

    def early_keys(self, likely: bool) -> list[Key]:
        """Programs to compile before the pool's size is known: all if this one is `likely`,
        otherwise those that are the same for any pool of the same maximum length. Those that tell
        the memory of a step go first."""
        found = [key for key in self.lattice if likely or not self.variant(key).uses_pages]
        first = self.largest_others
        return sorted(found, key=lambda key: key not in first)

    def name(self, key: Key) -> str:
        """The program's name between starts: its sizes, and the sizes of pool and tables."""
        if self.variant(key).uses_pages:
            pages = page_counts(self.shapes.kv)
        else:
            pages = (0,)
        parts = key.program, *key.sizes, "of", self.shapes.table_width, *pages
        return "-".join(map(str, parts))

    @staticmethod
    def _rows(key: Key) -> int:
        return PROGRAMS[key.program].rows(key.sizes)


@functools.cache
def forward_key(shape: int | ExtendShape) -> Key:
    """The forward of a decode bucket or an extend shape."""
    if isinstance(shape, ExtendShape):
        return Key("extend", (shape.tokens, shape.chunks, shape.decodes))
    return Key("decode", (shape,))


def needed_bytes(program: jax.stages.Compiled) -> int:
    """Bytes that a program needs on one device beside its arguments: temporaries, and outputs that
    take no argument's buffer."""
    found = program.memory_analysis()
    if found is None:
        return 0
    return found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


def weight_leaves(state: Any) -> tuple[tuple[Array, ...], jax.tree_util.PyTreeDef]:
    """The leaves of an nnx state as a flat tuple (cheap to dispatch) and the tree to rebuild it."""
    leaves, treedef = jax.tree.flatten(state)
    return tuple(leaves), treedef
