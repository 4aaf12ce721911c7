"""What a step program is, and the arrays that stay on the device between programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array

from jaxllm.cache.arrays import KVCache
from jaxllm.engine.runtime.compilation.executables import Recipe
from jaxllm.engine.runtime.shapes import StepShapes
from jaxllm.engine.runtime.state import SlotState
from jaxllm.mesh import place

type Sizes = tuple[int, ...]

MAX_DEPTH = 2  # steps in flight


class Key(NamedTuple):
    """Name of one executable: the program and the sizes of its variant. Plain data."""

    program: str
    sizes: Sizes = ()


class Resident(NamedTuple):
    """Arrays that stay on the device between programs, by their attribute of `StepShapes`.

    Attributes:
        name: the attribute; the arrays are a tree.
        rows: rows of logits, for arrays that exist once for each number of them.
        field: one field of the tree; empty for the whole tree.
    """

    name: str
    rows: int = 0
    field: str = ""

    def shapes(self, shapes: StepShapes) -> Any:
        """The arrays as shapes with shardings."""
        found = getattr(shapes, self.name)
        if self.rows:
            found = found(self.rows)
        if self.field:
            return getattr(found, self.field)
        return found


WEIGHTS = Resident("weights")
KV = Resident("kv")
STATE = Resident("state")
PEERS = Resident("peers")
COUNTS = Resident("counts")
LOGITS_PARAMS = Resident("logits_params")


class DeviceArrays:
    """Weights, KV pages, slot state and what programs leave for each other. An array is zero until
    a program gives it.

    After a forward, `logits` of its number of rows are the forward's; after `process_logits` they
    are the processed ones.
    """

    def __init__(self, shapes: StepShapes, weights: tuple[Array, ...], kv: KVCache):
        self._shapes = shapes
        zeros = SlotState.zeros(shapes.slots, shapes.table_width)
        state = jax.tree.map(lambda x, s: place(x, s.sharding), zeros, shapes.state)
        self._arrays: dict[tuple[str, int], Any] = {}
        for at, value in ((WEIGHTS, weights), (KV, kv), (STATE, state)):
            self.write(at, value)

    def read(self, at: Resident) -> Any:
        """An array, or a tree of them."""
        name, rows, field = at
        found = self._arrays.get((name, rows))
        if found is None:
            like = Resident(name, rows).shapes(self._shapes)
            found = self._arrays[name, rows] = self._shapes.zeros(like)
        if field:
            return getattr(found, field)
        return found

    def write(self, at: Resident, value: Any) -> None:
        """Replace an array, or one field of a tree."""
        name, rows, field = at
        if field:
            value = self._arrays[name, rows]._replace(**{field: value})
        self._arrays[name, rows] = value
        if name == "forward_output":
            self._arrays["logits", rows] = value.logits
        elif name == "processed_logits":
            self._arrays["logits", rows] = value

    def delete(self, *, keep_pages: bool = False) -> None:
        """Free everything except the weights and the inboxes, and KV pages that are to be kept."""
        pages = {at: tree for at, tree in self._arrays.items() if keep_pages and at[0] == KV.name}
        for at, tree in self._arrays.items():
            if at[0] not in (WEIGHTS.name, PEERS.name) and at not in pages:
                for array in jax.tree.leaves(tree):
                    array.delete()
        self._arrays = pages

    def pages(self) -> KVCache | None:
        """The KV pages; None once they are freed."""
        return self._arrays.get((KV.name, KV.rows))

    def wait(self) -> None:
        """Until no program runs."""
        for array in jax.tree.leaves(self._arrays):
            if not array.is_deleted():
                array.block_until_ready()


@dataclass(frozen=True)
class Variant:
    """One program at one size.

    Attributes:
        function: the pure device function.
        takes: its arguments: resident arrays, or shapes of what the caller hands over.
        gives: its results: resident arrays that it replaces, or shardings of what the caller gets.
            Arrays that are taken and given are donated: the result lies in the same buffer.
    """

    function: Callable
    takes: tuple[Any, ...]
    gives: tuple[Any, ...]

    @property
    def buffer_size(self) -> int:
        """Elements of the int32 buffer that the caller hands over; 0 if there is none. Matrices
        that it hands over are on the device already."""
        given = (x for x in self.takes if isinstance(x, jax.ShapeDtypeStruct))
        return next((x.shape[0] for x in given if x.ndim == 1), 0)

    @property
    def handed(self) -> jax.ShapeDtypeStruct:
        """What a forward takes of the stage before, [T, D]."""
        return next(
            x for x in self.takes if isinstance(x, jax.ShapeDtypeStruct) and len(x.shape) == 2
        )

    @property
    def uses_pages(self) -> bool:
        """Whether the program depends on the number of KV pages."""
        return KV in self.takes

    def recipe(self, shapes: StepShapes) -> Recipe:
        """What to compile."""
        out = [
            shardings(given.shapes(shapes)) if isinstance(given, Resident) else given
            for given in self.gives
        ]
        return Recipe(
            self.function,
            tuple(x.shapes(shapes) if isinstance(x, Resident) else x for x in self.takes),
            tuple(
                at for at, x in enumerate(self.takes) if isinstance(x, Resident) and x in self.gives
            ),
            out[0] if len(out) == 1 else tuple(out),
        )


@dataclass(frozen=True)
class Program:
    """One step program in all sizes. A new one is an entry in `programs/` and its caller.

    Attributes:
        name: that of its function; also in profiles, kept programs and tables of XLA options.
        sizes: the variants to compile, largest first where they differ in cost.
        build: the variant of given sizes: `build(shapes, *sizes)`.
        rank: order of compiling; what takes longest goes first.
        is_kept: whether the lowered program is worth keeping for later starts.
        has_products: whether it multiplies by weights, so XLA may time kernels for it.
        may_need_most: whether its largest variant may need more memory than any forward.
        rows: rows that a variant computes, for XLA's options.
        buffers: host buffers that may wait for the device at once.
        acknowledges: the last result is there when the host buffer was read; then `buffers` bounds
            memory. Otherwise `buffers` is what the steps in flight can use.
        runs: whether the model of these shapes needs it; most programs generate, in the last stage.
        is_first: whether a server needs the variant to be ready. Where programs run on the
            processors that compile them, others may come while it serves.
    """

    name: str
    sizes: Callable[[StepShapes], Iterable[Sizes]]
    build: Callable[..., Variant]
    rank: int = 9
    is_kept: Callable[[StepShapes], bool] = lambda shapes: False
    has_products: bool = False
    may_need_most: Callable[[StepShapes], bool] = lambda shapes: False
    rows: Callable[[Sizes], int] = lambda sizes: sizes[0] if sizes else 0
    buffers: Callable[[StepShapes], int] = lambda shapes: in_flight(shapes) + 2
    acknowledges: bool = False
    runs: Callable[[StepShapes], bool] = lambda shapes: draws(shapes)
    is_first: Callable[[StepShapes, Sizes], bool] = lambda shapes, sizes: True


def always(shapes: StepShapes) -> bool:
    """For flags of `Program` that no shape changes."""
    return True


def never_first(shapes: StepShapes, sizes: Sizes) -> bool:
    """Of programs that only some requests need, for `is_first`."""
    return False


def generates(shapes: StepShapes) -> bool:
    """Of programs that every stage of a generating model needs."""
    return shapes.pooling is None


def draws(shapes: StepShapes) -> bool:
    """Of programs that the last stage of a generating model needs, which makes logits."""
    return generates(shapes) and shapes.stage.is_last


def in_flight(shapes: StepShapes) -> int:
    """Steps in flight at most: one for each stage, where there are several."""
    return max(MAX_DEPTH, shapes.stage.count)


def shardings(tree: Any) -> Any:
    """The shardings of a tree of shapes."""
    return jax.tree.map(lambda s: s.sharding, tree)
