"""From a `ModelSpec` and a model directory to a model on the mesh.

Parameters are filled shard by shard: only the slices that a device holds are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.config import LOAD_FORMATS, ConfigError
from jaxllm.mesh import WHOLE, Stage, layer_devices, sharding
from jaxllm.models import ModelSpec
from jaxllm.models.config.build import (
    folders,
    head_name,
    held_layers,
    ignored,
    keep_stage,
    outline,
    read_name,
    rules,
    unused_prefixes,
)
from jaxllm.nn.rules import Piece, Rule
from jaxllm.weights import reader
from jaxllm.weights.dummy import dummy
from jaxllm.weights.kept import Kept, digest
from jaxllm.weights.rounding import Rounding, filled_by
from jaxllm.weights.stored import PLAIN_DTYPES, Tensor

MAX_NAMED_PROBLEMS = 20
COMPARE_BYTES = COPY_BYTES = 2**24
# 14 GiB onto one GPU from the page cache: 6.1 s with one thread, 2.2 s with four, 1.6 s with eight
READERS = 4

type Progress = Callable[[int, int], None]
type Index = tuple[slice, ...]
type View = Callable[[str], Tensor]  # of a checkpoint tensor, by name


def abstract(
    spec: ModelSpec, mesh: Mesh, dtype: DTypeLike, stage: Stage = WHOLE
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model, or one stage of it, as (graphdef, state) whose leaves are ShapeDtypeStructs with
    shardings.

    That is enough to compile.
    """
    found = _outline(spec, mesh, dtype, stage)
    return found.graphdef, found.state


def check(
    model_dir: str | Path,
    spec: ModelSpec,
    mesh: Mesh,
    dtype: DTypeLike,
    load_format: str = "auto",
    cache: Path | None = None,
    stages: Sequence[Stage] = (WHOLE,),
) -> None:
    """Raises the ConfigError that `load` would raise, from the files' headers and, unless weights
    of all `stages` are kept in the `cache`, from scales of packed ones."""
    if _reads_files(load_format):
        checkpoint, graph = open_checkpoint(model_dir, spec), _outline(spec, mesh, dtype)
        _check(checkpoint, _held(checkpoint, graph.rules), spec)
        parts = (
            graph if stage == WHOLE else _outline(spec, mesh, dtype, stage) for stage in stages
        )
        entries = (_entry(cache, spec, checkpoint, part) for part in parts)
        # Without a cache no stage is outlined
        if cache is None or not all(entry and entry.folder.is_dir() for entry in entries):
            checkpoint.check_values()


def check_shapes(model_dir: str | Path, spec: ModelSpec, load_format: str = "auto") -> None:
    """Raises ConfigError when the files hold tensors of other sizes, or fewer layers, than the spec
    says.

    Only one layer is looked at, so that absurd sizes are refused in no time, before anything is
    built. Files that cannot be read are left to `check`.
    """
    checkpoint = open_checkpoint(model_dir, spec) if _reads_files(load_format) else None
    if checkpoint is None or checkpoint.problems:
        return
    first = spec.first_layers(1)
    table = _held(checkpoint, rules(first, outline(first, 1, np.float32)))
    problems = _mismatches(checkpoint, [piece for rule in table for piece in rule.pieces])
    held = held_layers(spec, checkpoint.entries)
    if len(spec.layers) > held:
        problems.append(f"num_hidden_layers is {len(spec.layers)}, the files hold {held} layers")
    _refuse(checkpoint, problems)


def open_checkpoint(model_dir: str | Path, spec: ModelSpec) -> reader.Checkpoint:
    """The model's tensors under the names that the rules know."""
    checkpoint = reader.Checkpoint(model_dir)
    checkpoint.rename(read_name(spec, checkpoint.entries))
    if spec.scheme is not None:
        own = [name for name, kind in spec.formats.items() if not kind.rounded]
        checkpoint.unpack(spec.scheme, {*own, *(f"{name}.weight" for name in own)})
    for folder in folders(spec):
        checkpoint.add_folder(folder)
    return checkpoint


def _reads_files(load_format: str) -> bool:
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format {load_format!r} is not supported; choose one of {', '.join(LOAD_FORMATS)}"
        )
    return load_format != "dummy"


def load(
    model_dir: str | Path,
    spec: ModelSpec,
    mesh: Mesh,
    dtype: DTypeLike,
    load_format: str = "auto",
    *,
    seed: int = 0,
    progress: Progress | None = None,
    cache: Path | None = None,
    stage: Stage = WHOLE,
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model, or one stage of it, as (graphdef, state) with arrays on the mesh.

    `progress(done_bytes, total_bytes)` is called after each parameter. "dummy" reads no file and
    draws random weights from `seed`. Packed and rounded weights are read from the `cache` where
    they are kept there, else written to it. Raises one ConfigError that names every missing, extra,
    truncated or wrongly shaped tensor.
    """
    reads = _reads_files(load_format)
    graph = _outline(spec if reads else spec.rounding(), mesh, dtype, stage)
    likes, rounding = graph.likes, Rounding(graph.likes, dtype)
    placed: dict[str, jax.Array] = {}
    total = sum(like.size * like.dtype.itemsize for like in likes.values())

    def take(arrays: Mapping[str, jax.Array]) -> None:
        placed.update(arrays)
        if progress:
            progress(sum(array.nbytes for array in placed.values()), total)

    filled: Iterator[Mapping[str, jax.Array]]
    entry: Kept | None = None
    if not reads:
        plain = dummy(graph.rules, [rounding.like(rule) for rule in graph.rules], seed)
        filled = map(rounding.finished, graph.rules, plain)
    else:
        checkpoint = open_checkpoint(model_dir, spec)
        table = _held(checkpoint, graph.rules)
        entry = _entry(cache, spec, checkpoint, graph)
        if entry is not None and entry.found(likes, take):
            return graph.filled(placed)
        placed.clear()  # of an entry that is damaged
        if stage == WHOLE:  # the rules of a stage know only their own tensors
            _check(checkpoint, table, spec)
        filled = _place_all(table, rounding, checkpoint)
    rounding.take_room(graph.rules)
    for arrays in filled:
        take(arrays)
    if entry is not None:
        entry.keep(placed)
    return graph.filled(placed)


def kept_entry(
    model_dir: str | Path,
    spec: ModelSpec,
    mesh: Mesh,
    dtype: DTypeLike,
    cache: Path | None,
    stage: Stage = WHOLE,
) -> Kept | None:
    """The entry of the cache that `load` reads or writes; None where weights are plain, or lie on
    several hosts."""
    checkpoint = open_checkpoint(model_dir, spec)
    return _entry(cache, spec, checkpoint, _outline(spec, mesh, dtype, stage))


def _entry(
    cache: Path | None, spec: ModelSpec, checkpoint: reader.Checkpoint, graph: _Outline
) -> Kept | None:
    if cache is None or not (spec.formats or spec.scheme is not None) or jax.process_count() > 1:
        return None
    rules = _held(checkpoint, graph.rules)  # their tensors tell a stage from another
    return Kept(cache, digest(checkpoint, spec.scheme, rules, graph.likes))


@dataclass(frozen=True)
class _Outline:
    """A model that holds no arrays yet.

    Attributes:
        graphdef: its modules.
        state: its parameters as ShapeDtypeStructs with shardings.
        likes: the state's leaves by dotted path, in flatten order.
        rules: one for each of them, those of plain parameters first: what is freed while others are
        rounded then leaves no holes between parameters.
    """

    graphdef: nnx.GraphDef
    state: nnx.State
    likes: dict[str, jax.ShapeDtypeStruct]
    rules: list[Rule]

    def filled(self, arrays: Mapping[str, jax.Array]) -> tuple[nnx.GraphDef, nnx.State]:
        """The model with these arrays."""
        leaves = [arrays[name] for name in self.likes]
        return self.graphdef, jax.tree.unflatten(jax.tree.structure(self.state), leaves)


def _outline(spec: ModelSpec, mesh: Mesh, dtype: DTypeLike, stage: Stage = WHOLE) -> _Outline:
    spec = replace(spec, expert_groups=mesh.shape["expert"])
    model = outline(spec, layer_devices(mesh), dtype)
    table = sorted(rules(spec, model), key=lambda rule: rule.rounded is not None)
    if stage != WHOLE:
        table = keep_stage(model, table, stage)
    graphdef, state = nnx.split(model)
    parameters, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    likes = {}
    for path, parameter in parameters:
        shape = parameter.get_value()
        where = sharding(mesh, parameter.get_metadata("axes"))
        name = ".".join(str(getattr(key, "key", key)) for key in path)
        likes[name] = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)
    made = [name for rule in table for name in filled_by(rule, likes)]
    if sorted(made) != sorted(likes):
        differing = sorted(set(made) ^ set(likes))[:5]
        raise RuntimeError(f"the rules of {spec.model_type} and its parameters differ: {differing}")
    state = jax.tree.unflatten(jax.tree.structure(state), list(likes.values()))
    return _Outline(graphdef, state, likes, table)


def _place_all(
    rules: list[Rule], rounding: Rounding, checkpoint: reader.Checkpoint
) -> Iterator[Mapping[str, jax.Array]]:
    """The parameters of each rule, in the order of `rules`.

    A thread keeps its parameter on the host until the devices have it, so that some threads copy
    while others transfer.
    """
    with ThreadPoolExecutor(READERS, thread_name_prefix="weights") as pool:
        yield from pool.map(lambda rule: _placed(rule, rounding, checkpoint.view), rules)


def _placed(rule: Rule, rounding: Rounding, view: View) -> Mapping[str, jax.Array]:
    like = rounding.like(rule)
    if rule.rounded is None:
        return {rule.parameter: jax.block_until_ready(place(rule, like, view))}
    blocks: dict[Index, np.ndarray] = {}
    for index in like.sharding.addressable_devices_indices_map(like.shape).values():
        if index not in blocks:
            blocks[index] = read_block(rule, like, index, view)
    return rounding.placed(rule, blocks)


def place(rule: Rule, like: jax.ShapeDtypeStruct, view: View) -> jax.Array:
    """The parameter of `rule` on the devices of `like.sharding`, in `like.dtype`.

    The host holds copies of this parameter alone.
    """

    def block(index: Index) -> np.ndarray:
        return read_block(rule, like, index, view)

    return jax.make_array_from_callback(like.shape, like.sharding, block, dtype=like.dtype)


def read_block(rule: Rule, like: jax.ShapeDtypeStruct, index: Index, view: View) -> np.ndarray:
    """parameter[index], cast while it is copied. Slices have step 1, and rows behind all pieces are
    zero."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, like.shape, strict=True)]
    out = np.empty([stop - start for start, stop in bounds], like.dtype)
    (whole, *others), cuts = rule.pieces, tuple(slice(*bound) for bound in bounds)
    if not others and (whole.view[1:], whole.repeat, whole.row) == (like.shape[1:], 1, 0):
        found = whole.arranged(view(whole.name))[cuts]
        _copy(out[: found.shape[0]], found, rule.parameter)
        out[found.shape[0] :] = 0
        return out
    (begin, end), (left, right) = bounds[:2]
    for piece in rule.pieces:
        rows = range(max(begin, piece.row), min(end, piece.row + piece.rows))
        first, last = max(left, piece.start), min(right, piece.start + piece.view[1])
        if not rows or first >= last:
            continue
        source = piece.arranged(view(piece.name))
        own = (slice(first - piece.start, last - piece.start), *cuts[2:])
        for row in rows:
            found = source[(row - piece.row) // piece.repeat][own]
            _copy(out[row - begin, first - left : last - left], found, rule.parameter)
    filled = max(piece.row + piece.rows for piece in rule.pieces)
    out[max(0, filled - begin) :] = 0
    return out


def _copy(target: np.ndarray, source: Tensor, parameter: str) -> None:
    """Copy with a cast, some rows at a time, since those of a packed tensor are unpacked here.
    Raises ConfigError where float16 overflows."""
    rows = max(1, COPY_BYTES * len(target) // max(1, target.nbytes))
    with np.errstate(over="ignore"):
        for at in range(0, len(target), rows):
            target[at : at + rows] = source[at : at + rows]
    if target.dtype == np.float16 and not np.isfinite(target).all():
        raise ConfigError(
            f"{parameter} has values beyond the range of float16 (65504); "
            "use dtype bfloat16 or float32"
        )


def _held(checkpoint: reader.Checkpoint, rules: list[Rule]) -> list[Rule]:
    """The rules in the forms that the checkpoint holds."""
    names = checkpoint.entries
    return [rule.for_tensors(names) for rule in rules]


def _check(checkpoint: reader.Checkpoint, rules: list[Rule], spec: ModelSpec) -> None:
    """Raises ConfigError unless every tensor of the checkpoint has a use, and every piece a tensor
    of its shape."""
    problems, found = list(checkpoint.problems), checkpoint.entries
    needless, prefixes = ignored(spec), unused_prefixes(spec)
    pieces = [piece for rule in rules for piece in rule.pieces]
    expected = {piece.name for piece in pieces}
    head = f"{head_name(spec)}.weight"
    remedy = {head: " (where the embedding is the head, set tie_word_embeddings to true)"}
    problems += [f"missing {n}{remedy.get(n, '')}" for n in checkpoint.missing(expected)]
    strange = sorted(set(found) - expected - set(needless))
    strange = [name for name in strange if not name.startswith(prefixes)]
    problems += [f"unexpected {name}" for name in strange if not checkpoint.is_zero_bias(name)]
    problems += _mismatches(checkpoint, pieces)
    if not problems:
        problems = [
            f"{name} differs from {other} although tie_word_embeddings is true; "
            "set it to false in config.json"
            for name, other in needless.items()
            if name in found and other is not None and not _equal(checkpoint, name, other)
        ]
    _refuse(checkpoint, problems)


def _mismatches(checkpoint: reader.Checkpoint, pieces: list[Piece]) -> list[str]:
    """Pieces whose tensors are there, but not as they are expected."""
    entries = checkpoint.entries
    found = [(piece, entries.get(piece.name)) for piece in pieces]
    known = tuple(PLAIN_DTYPES)
    each = (mismatch(piece, own.dtype, own.shape, known) for piece, own in found if own)
    return list(dict.fromkeys(problem for problem in each if problem))


def mismatch(
    piece: Piece, dtype: str, shape: tuple[int, ...], known: tuple[str, ...]
) -> str | None:
    """Why a checkpoint tensor cannot be this piece, or None. `known` are the readable dtypes."""
    if shape != piece.source:
        return f"{piece.name} has shape {list(shape)}, expected {list(piece.source)}"
    if dtype not in known:
        return f"{piece.name} has dtype {dtype}, which is not one of {', '.join(known)}"
    return None


def _refuse(checkpoint: reader.Checkpoint, problems: list[str]) -> None:
    """Raises one ConfigError that names the problems, if there are any."""
    if problems:
        named, others = problems[:MAX_NAMED_PROBLEMS], len(problems) - MAX_NAMED_PROBLEMS
        listing = [problem[:200] for problem in named] + [f"and {others} more"] * (others > 0)
        raise ConfigError(
            f"checkpoint {checkpoint.directory} does not fit its config.json: {'; '.join(listing)}"
        )


def _equal(checkpoint: reader.Checkpoint, name: str, other: str) -> bool:
    """Whether two tensors are there as plain numbers, and equal; compared in parts for memory."""
    own, another = checkpoint.entries[name], checkpoint.entries.get(other)
    if another is None or own.shape != another.shape or own.dtype not in PLAIN_DTYPES:
        return False
    left, right = (np.asarray(checkpoint.view(each)).reshape(-1) for each in (name, other))
    step = COMPARE_BYTES // left.itemsize
    return all(
        np.array_equal(left[at : at + step], right[at : at + step])
        for at in range(0, left.size, step)
    )
