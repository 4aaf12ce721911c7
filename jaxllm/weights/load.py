"""From an outline and a model's files to a model on the mesh.

Parameters are filled shard by shard: only the slices that a device holds are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import jax
from flax import nnx

from jaxllm.mesh import WHOLE
from jaxllm.nn.rules import Rule
from jaxllm.weights.blocks import View
from jaxllm.weights.check import check_tensors, reads_files
from jaxllm.weights.dummy import dummy
from jaxllm.weights.fill import fill, is_small, prepare
from jaxllm.weights.kept import Kept, kept_at
from jaxllm.weights.loader import Loader
from jaxllm.weights.model_files import Model, opened
from jaxllm.weights.outline import Outline
from jaxllm.weights.reader import named
from jaxllm.weights.rounding import Rounding, filled_by

type Progress = Callable[[int, int], None]
type Filled = Iterator[Mapping[str, jax.Array]]  # parameters by name, as they are done


def load(
    model: Model,
    outline: Outline,
    load_format: str = "auto",
    *,
    seed: int = 0,
    progress: Progress | None = None,
    cache: Path | None = None,
    before: Sequence[jax.Array] = (),
    loader: Loader | None = None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """The outlined model, or stage of it, as (graphdef, state) with arrays on the mesh.

    `progress(done_bytes, total_bytes)` is called after each parameter. "dummy" reads no file and
    draws random weights from `seed`. Packed and rounded weights are read from the `cache` where
    they are kept there, else written to it. Raises one ConfigError that names every missing, extra,
    truncated or wrongly shaped tensor.

    Parameters are written into those of `before`, a state's leaves, as far as there are any; these
    are lost, also when loading fails. A `loader` serves several loads.
    """
    is_read = reads_files(load_format)
    if not is_read:
        outline = outline.rounding()
    likes = outline.likes
    overwritten = dict(zip(likes, before, strict=False))
    rounding = Rounding(likes, outline.dtype, loader or Loader(), overwritten)
    placed: dict[str, jax.Array] = {}
    total = sum(like.size * like.dtype.itemsize for like in likes.values())
    with ExitStack() as stack:
        unkept: Kept | None = None
        if is_read:
            filled, unkept = _read(model, outline, rounding, cache, stack)
        else:
            filled = _drawn(outline, rounding, seed)
        for arrays in filled:
            placed.update(arrays)
            if progress:
                progress(sum(array.nbytes for array in placed.values()), total)
    if unkept is not None:
        unkept.keep(placed)
    return outline.filled(placed)


def _read(
    model: Model, outline: Outline, rounding: Rounding, cache: Path | None, stack: ExitStack
) -> tuple[Filled, Kept | None]:
    """The parameters from the model's files, or from the cache; and the entry of the cache that
    lacks them, if one does. Files are open as long as the `stack`."""
    checkpoint = named(stack.enter_context(opened(model)), outline.spec)
    rules = checkpoint.stored_rules(outline.rules)
    view: View = checkpoint.view
    entry = kept_at(cache, checkpoint, outline)
    stored = None if entry is None else entry.read(outline.likes, stack)
    if stored is not None:
        rules, view = stored
        entry = None
    elif outline.stage == WHOLE:  # the rules of a stage know only their own tensors
        check_tensors(checkpoint, rules, outline.spec)
    large = [name for name, like in outline.likes.items() if not is_small(like)]
    rounding.take_room(dict.fromkeys([*large, *_written(rules, outline.likes)]))
    return fill(rules, rounding, view), entry


def _drawn(outline: Outline, rounding: Rounding, seed: int) -> Filled:
    """Random parameters."""
    prepare(outline.rules, rounding)
    rounding.take_room(_written(outline.rules, outline.likes))
    plain = dummy(outline.rules, [rounding.like(rule) for rule in outline.rules], seed)
    return map(rounding.finished, outline.rules, plain)


def _written(rules: Iterable[Rule], likes: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
    """The parameters that weights are rounded into."""
    return [name for rule in rules if rule.rounded for name in filled_by(rule, likes)]


def kept_entry(model: Model, outline: Outline, cache: Path | None) -> Kept | None:
    """The entry of the cache that `load` reads or writes; None where weights are plain, or lie on
    several hosts."""
    with opened(model) as files:
        return kept_at(cache, named(files, outline.spec), outline)
