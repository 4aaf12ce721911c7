"""Every executable the engine may run, compiled before serving and looked up by shape; never
compiled while serving."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.cache.kv import KVCache
from jaxllm.cache.transfer import page_shapes
from jaxllm.engine.runtime import step
from jaxllm.engine.runtime.batch import ChunkLayout, Shapes, packed_size, update_shapes
from jaxllm.engine.runtime.executables import Executables, Recipe
from jaxllm.engine.runtime.pinned_memory import PINNED
from jaxllm.engine.runtime.state import SlotState
from jaxllm.engine.scheduling.buckets import Buckets, ExtendShape
from jaxllm.logprobs import widths
from jaxllm.sampling.process import LogitsParams
from jaxllm.sampling.sample import Sampler, backend_for

type Key = tuple[str, object]
type Progress = Callable[[int, int], None]  # told (done, total)

SAID = 1024  # tokens of an output that a seat takes at once
# Rows whose masks travel at once; at a vocabulary of 152,064 they are 1.2 MB, 25 µs of a GPU's link
MASKS = 64
# Lowered in no time
SMALL = ("update_slots", "copy", "save", "load", "set_slot", "apply_token_bitmask")
WITHOUT_PAGES = ("sample", "process", "logprobs", "score", "set_slot", "apply_token_bitmask")


@dataclass(frozen=True)
class Abstract:
    """Shapes and shardings of what the programs take, known before any weight is loaded."""

    weights: tuple[jax.ShapeDtypeStruct, ...]
    kv: KVCache
    state: SlotState
    vocab_size: int
    # Of the chunk tokens of the largest step behind the last attention, [T, D]
    states: jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Scoring:
    """Which log-probabilities there are: of so many most likely tokens at most, in one of
    `config.LOGPROBS_MODES`."""

    most: int
    mode: str = "raw_logprobs"


class Programs:
    """The lattice. `compile_all` builds it in threads (XLA releases the GIL); a missing program is
    built on first use, which only happens with `enforce_eager`."""

    def __init__(
        self,
        model: step.Model,
        abstract: Abstract,
        buckets: Buckets,
        scoring: Scoring,
        executables: Executables | None = None,
        moved: int = 0,
    ):
        self.model, self.abstract, self.buckets, self.scoring = model, abstract, buckets, scoring
        # Pages that one program moves between the pool and host memory; 0: nothing is moved
        self.moved = moved
        self.widths = widths(scoring.most)
        self.executables = executables or Executables()
        self.table_width = abstract.state.table.shape[1]
        self.slots = abstract.state.rows.shape[0]
        self.kinds = len(abstract.kv.num_pages)  # of layers
        self.replicated = NamedSharding(model.mesh, PartitionSpec())
        self._compiled: dict[Key, jax.stages.Compiled] = {}
        self._making: dict[Key, Future[jax.stages.Compiled]] = {}
        self._stopped = False

    def keys(self) -> list[Key]:
        """Every program of the lattice, in the order of compiling: first those for which XLA times
        kernels, then what takes longest: two attention kernels, then the samplers' one, then the
        others."""
        decode: list[Key] = [("decode", rows) for rows in sorted(self.buckets.decode)]
        extend: list[Key] = [
            ("extend", s)
            for s in sorted(self.buckets.extend, key=lambda s: (not s.decodes, -s.tokens))
        ]
        rows = sorted(self.buckets.logits, reverse=True)
        sample: list[Key] = [("sample", (n, s)) for n in rows for s in self.samplers]
        process: list[Key] = [("process", n) for n in rows]
        small: list[Key] = [
            *(("copy", pairs) for pairs in self.buckets.copies),
            ("update_slots", True),
            ("update_slots", False),
        ]
        if self.moved:
            small += [("save", self.moved), ("load", self.moved)]
        logprobs: list[Key] = [("logprobs", (n, width)) for n in rows for width in self.widths]
        scores: list[Key] = [("score", (self.buckets.score, width)) for width in self.widths]
        keys = [
            *extend,
            *sample,
            *decode,
            *scores,
            *process,
            *logprobs,
            ("set_slot", 0),
            ("apply_token_bitmask", 0),
            *small,
        ]
        return sorted(keys, key=lambda key: not self.is_tuned(key))

    def get(self, kind: str, shape: object) -> jax.stages.Compiled:
        """The executable of one key; waits for it where another thread is at it."""
        key = (kind, shape)
        program = self._compiled.get(key)
        return self._make(key) if program is None else program

    def compile_all(self, progress: Progress | None = None) -> None:
        """Compile the whole lattice; `progress(done, total)` after each program."""
        self.compile(self.keys(), progress)

    def compile(self, keys: Iterable[Key], progress: Progress | None = None) -> None:
        """Compile these programs, where they are not yet, in as many threads as half the cores."""
        keys = [key for key in keys if key not in self._compiled]
        workers = max(2, (os.cpu_count() or 2) // 2)
        with ThreadPoolExecutor(workers, thread_name_prefix="compile") as pool:
            for done, _ in enumerate(pool.map(self._make_unless_stopped, keys), 1):
                if progress:
                    progress(done, len(keys))

    def stop(self) -> None:
        """Have `compile`, in other threads, begin with nothing more."""
        self._stopped = True

    def _make_unless_stopped(self, key: Key) -> None:
        if not self._stopped:
            self._make(key)

    def _make(self, key: Key) -> jax.stages.Compiled:
        """Compile a program, once however many threads want it."""
        mine: Future[jax.stages.Compiled] = Future()
        making = self._making.setdefault(key, mine)
        if making is mine:
            try:
                self._compiled[key] = self._compile(key)
                making.set_result(self._compiled[key])
            except BaseException as error:
                del self._making[key]  # whoever asks later tries again
                making.set_exception(error)
        return making.result()

    @property
    def largest(self) -> Key:
        """The forward that needs most memory."""
        return ("extend", self.buckets.extend[-1])

    @property
    def largest_others(self) -> list[Key]:
        """The other programs that may need much: those over most rows of logits. A draw kernel
        needs nothing, and lowers for seconds."""
        rows, width = self.buckets.logits[-1], self.widths[-1]
        draws: list[Key] = (
            [("sample", (rows, self.samplers[-1]))] if self._draw_backend == "reference" else []
        )
        return [
            *draws,
            ("process", rows),
            ("logprobs", (rows, width)),
            ("score", (self.buckets.score, width)),
        ]

    def for_pool(self, abstract: Abstract) -> Programs:
        """The lattice for a pool of another size. What takes no pages is not compiled again where
        the slot state is the same."""
        other = Programs(
            self.model, abstract, self.buckets, self.scoring, self.executables, self.moved
        )
        if other.table_width == self.table_width:
            other._compiled = {
                key: program for key, program in self._compiled.items() if key[0] in WITHOUT_PAGES
            }
        return other

    @property
    def peak_bytes(self) -> int:
        """Bytes on one device that the compiled programs need at most beside weights, pages and
        slot state: temporaries and outputs."""
        return max(map(needed_bytes, self._compiled.values()), default=0)

    def layout(self, shape: ExtendShape) -> ChunkLayout:
        """How chunks of this shape are packed."""
        return ChunkLayout(shape, self.table_width, self.buckets.logit_rows(shape))

    def recipe(self, key: Key) -> Recipe:
        """What to compile for one key."""
        kind, shape = key
        return getattr(self, f"_{kind}")(shape)

    def is_kept(self, key: Key) -> bool:
        """Whether the lowered program is worth keeping for later starts, and known by its name:
        functions of research code are not."""
        return key[0] not in SMALL and not (key[0] == "process" and self.model.processors)

    def early_keys(self, likely: bool) -> list[Key]:
        """What to make before the pool's size is known: all programs if this one is `likely`, or
        those that are the same for a pool of any size, as long as requests may be as long with it.
        First those that tell the size, then in the order of compiling."""
        found = [key for key in self.keys() if likely or key[0] in WITHOUT_PAGES]
        return sorted(found, key=lambda key: key not in self.largest_others)

    def is_tuned(self, key: Key) -> bool:
        """Whether XLA times kernels on the device to compile the program."""
        return self.executables.tunes(key[0], _rows(key[1]))

    def _compile(self, key: Key) -> jax.stages.Compiled:
        return self.executables.compile(
            self.name(key), _rows(key[1]), self.recipe(key), keep=self.is_kept(key)
        )

    def name(self, key: Key) -> str:
        """The program's name between starts: its shape, and what may change while the configuration
        stays.
        """
        kind, shape = key
        numbers = (
            dataclasses.astuple(shape)
            if isinstance(shape, ExtendShape)
            else shape
            if isinstance(shape, tuple)
            else (shape,)
        )
        pages = (
            self.abstract.kv.num_pages
            if kind in ("decode", "extend", "copy", "save", "load")
            else (0,)
        )
        return "-".join(
            str(part) for part in (kind, *map(int, numbers), "of", self.table_width, *pages)
        )

    def _shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)

    @functools.cached_property
    def state(self) -> SlotState:
        """The slot state's shapes and shardings."""
        return jax.tree.map(lambda s: self._shape(s.shape, s.dtype), self.abstract.state)

    @functools.cached_property
    def host(self) -> NamedSharding:
        """Where the host and the programs meet: pinned host memory on GPUs, which programs read and
        write in order with their other work, while a copy from or to other memory takes a
        millisecond there."""
        gpu = self.executables.platform == "gpu"
        return self.replicated.with_memory_kind(PINNED) if gpu else self.replicated

    @functools.cached_property
    def _logits_sharding(self) -> NamedSharding:
        split = self.abstract.vocab_size % self.model.mesh.shape["tensor"] == 0
        return NamedSharding(
            self.model.mesh, PartitionSpec(None, "tensor") if split else PartitionSpec()
        )

    @functools.cached_property
    def _draw_backend(self) -> str:
        """Which of `pallas_kernels.draw` samples. The kernel sees whole rows, so the vocabulary
        must be on one device."""
        kernel = self.model.backend == "mosaic_gpu" and self.model.mesh.size == 1
        return backend_for(
            self.forward_output(self.buckets.logits[-1]).logits,
            "mosaic_gpu" if kernel else "reference",
        )

    @functools.cached_property
    def samplers(self) -> tuple[Sampler, ...]:
        """Those compiled, cheapest first. The kernel filters as fast as it draws, so with it one
        program serves both."""
        return tuple(
            s for s in Sampler if s is not Sampler.RANDOM or self._draw_backend == "reference"
        )

    def sampler(self, needed: int) -> Sampler:
        """The cheapest compiled sampler that does what is needed."""
        return next(s for s in self.samplers if s >= needed)

    @functools.cached_property
    def states(self) -> jax.ShapeDtypeStruct:
        """What extends leave of the chunk tokens."""
        return self._shape(self.abstract.states.shape, self.abstract.states.dtype)

    @functools.cached_property
    def staged(self) -> jax.ShapeDtypeStruct:
        """The packed chunks of any extend shape, resident on the device."""
        return self._shape(
            (max(packed_size(self.layout(shape).shapes) for shape in self.buckets.extend),),
            jnp.int32,
        )

    def forward_output(self, rows: int) -> step.ForwardOutput:
        """What a forward with `rows` rows of logits leaves, as shapes."""
        logits = jax.ShapeDtypeStruct(
            (rows, self.abstract.vocab_size), jnp.float32, sharding=self._logits_sharding
        )
        return step.ForwardOutput(
            logits, self._shape((rows,), jnp.int32), self._shape((rows,), jnp.bool_)
        )

    @functools.cached_property
    def terms(self) -> LogitsParams:
        """What requests ask of `process`, as shapes with shardings."""
        shapes = LogitsParams.shapes(self.slots, self.abstract.vocab_size, self.model.processors)
        return jax.tree.map(lambda s: self._shape(s.shape, s.dtype), shapes)

    @functools.cached_property
    def counts(self) -> jax.ShapeDtypeStruct:
        """How often each slot's output has each token; the vocabulary is split like that of
        logits."""
        shape = (self.slots + 1, self.abstract.vocab_size)
        return jax.ShapeDtypeStruct(shape, jnp.uint16, sharding=self._logits_sharding)

    @functools.cached_property
    def seat_shapes(self) -> Shapes:
        """What `set_slot` takes from the host: one row of the terms, and tokens said."""
        rows: Shapes = {
            name: (s.shape[1:], np.dtype(s.dtype).type) for name, s in vars(self.terms).items()
        }
        return rows | {
            "slot": ((1,), np.int32),
            "first": ((1,), np.int32),
            "said": ((SAID,), np.int32),
        }

    @functools.cached_property
    def mask_shapes(self) -> Shapes:
        """What `apply_token_bitmask` takes from the host; rows that are not used name a slot that
        does not exist."""
        rows = min(MASKS, self.slots)
        return {
            "slot": ((rows,), np.int32),
            "allowed": ((rows, self.terms.allowed.shape[1]), np.uint32),
        }

    @property
    def update_shapes(self) -> Shapes:
        """What `update_slots` takes from the host in every case."""
        return update_shapes(self.slots, self.kinds)

    def upload_size(self, with_chunks: bool) -> int:
        """Elements of the host's buffer for `update_slots`."""
        return packed_size(self.update_shapes) + (self.staged.shape[0] if with_chunks else 0)

    def _update_slots(self, with_chunks: bool) -> Recipe:
        function = functools.partial(step.update_slots, self.kinds, local=self.replicated)
        buffer = jax.ShapeDtypeStruct(
            (self.upload_size(with_chunks),), jnp.int32, sharding=self.host
        )
        taken = self.state.table, self.state.rows, buffer
        return Recipe(
            function,
            (*taken, self.staged) if with_chunks else taken,
            (0, 1, 3) if with_chunks else (0, 1),
            self.replicated,
        )

    def _copy(self, pairs: int) -> Recipe:
        function = functools.partial(step.copy, local=self.replicated)
        buffer = jax.ShapeDtypeStruct((2 * pairs * self.kinds,), jnp.int32, sharding=self.host)
        return Recipe(function, (self.abstract.kv, buffer), (0,), shardings(self.abstract.kv))

    def _save(self, pages: int) -> Recipe:
        out = (shardings(self.abstract.kv), (shardings(page_shapes(self.abstract.kv)),) * pages)
        return Recipe(
            functools.partial(step.save, local=self.replicated),
            (self.abstract.kv, self._numbers(pages)),
            (0,),
            out,
        )

    def _load(self, pages: int) -> Recipe:
        arguments = (
            self.abstract.kv,
            self._numbers(pages),
            (page_shapes(self.abstract.kv),) * pages,
        )
        out = (shardings(self.abstract.kv), self.replicated)
        return Recipe(functools.partial(step.load, local=self.replicated), arguments, (0,), out)

    def _numbers(self, pages: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((pages,), jnp.int32, sharding=self.host)

    def _decode(self, rows: int) -> Recipe:
        logit_rows = self.buckets.logit_rows(rows)
        function = functools.partial(step.decode, self.model, rows, logit_rows)
        reused = self.forward_output(logit_rows)
        arguments = (self.abstract.weights, self.abstract.kv, self.state, reused)
        return Recipe(function, arguments, (1, 3), shardings((self.abstract.kv, reused)))

    def _extend(self, shape: ExtendShape) -> Recipe:
        function = functools.partial(step.extend, self.model, self.layout(shape))
        reused = self.forward_output(self.buckets.logit_rows(shape))
        arguments = (
            self.abstract.weights,
            self.abstract.kv,
            self.state,
            self.staged,
            reused,
            self.states,
        )
        return Recipe(
            function,
            arguments,
            (1, 2, 4, 5),
            shardings((self.abstract.kv, self.state, reused, self.states)),
        )

    def _score(self, key: tuple[int, int]) -> Recipe:
        rows, width = key
        function = functools.partial(
            step.score, self.model, self.scoring.mode, width, local=self.replicated
        )
        asked = jax.ShapeDtypeStruct((2 * rows,), jnp.int32, sharding=self.host)
        return Recipe(function, (self.abstract.weights, self.states, asked), (), self.host)

    def _sample(self, key: tuple[int, Sampler]) -> Recipe:
        rows, sampler = key
        function = functools.partial(step.draw, sampler, self._draw_backend)
        forward_output = self.forward_output(rows)
        arguments = (forward_output.logits, forward_output, self.state.progress, self.state.asks)
        return Recipe(function, arguments, (2,), (self.replicated, self.host))

    def _process(self, rows: int) -> Recipe:
        forward_output = self.forward_output(rows)
        function = functools.partial(step.shape_logits, self.model.processors)
        arguments = (forward_output, self.state, self.counts, self.terms, forward_output.logits)
        return Recipe(
            function, arguments, (2, 4), (self.counts.sharding, forward_output.logits.sharding)
        )

    def _set_slot(self, _: int) -> Recipe:
        function = functools.partial(step.set_slot, self.seat_shapes, self.replicated)
        arguments = (self.counts, self.terms, self._buffer(self.seat_shapes))
        return Recipe(
            function,
            arguments,
            (0, 1),
            (self.counts.sharding, shardings(self.terms), self.replicated),
        )

    def _apply_token_bitmask(self, _: int) -> Recipe:
        function = functools.partial(step.apply_token_bitmask, self.mask_shapes, self.replicated)
        return Recipe(
            function,
            (self.terms, self._buffer(self.mask_shapes)),
            (0,),
            (shardings(self.terms), self.replicated),
        )

    def _buffer(self, shapes: Shapes) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((packed_size(shapes),), jnp.int32, sharding=self.host)

    def _logprobs(self, key: tuple[int, int]) -> Recipe:
        rows, width = key
        function = functools.partial(step.logprobs, self.scoring.mode, width)
        forward_output = self.forward_output(rows)
        return Recipe(function, (forward_output.logits, forward_output, self.state), (), self.host)


def needed_bytes(program: jax.stages.Compiled) -> int:
    """What a program needs on one device beside its arguments: temporaries, and outputs that take
    no argument's buffer."""
    found = program.memory_analysis()
    return (
        0
        if found is None
        else found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    )


def _rows(shape: Any) -> int:
    """Rows that a program computes: tokens, or rows of logits."""
    if isinstance(shape, ExtendShape):
        return shape.tokens + shape.decodes
    return int(shape[0] if isinstance(shape, tuple) else shape)


def shardings(tree: Any) -> Any:
    """The shardings of a tree of shapes."""
    return jax.tree.map(lambda s: s.sharding, tree)


def place(tree: Any, like: Any) -> Any:
    """Host arrays onto the mesh, with the shardings of `like`."""
    return jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), tree, like)


def weight_leaves(state: Any) -> tuple[tuple[Array, ...], jax.tree_util.PyTreeDef]:
    """The leaves of an nnx state as a flat tuple (cheap to dispatch) and the tree to rebuild it."""
    leaves, treedef = jax.tree.flatten(state)
    return tuple(leaves), treedef
