"""From a `ModelSpec` and a model directory to a model on the mesh.

Parameters are filled shard by shard: only the slices that a device holds are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    attention_name,
    folders,
    head_name,
    held_layers,
    ignored,
    keep_stage,
    outline,
    read_name,
    rules,
    spellings,
    unused_prefixes,
)
from jaxllm.nn.rules import Piece, Rule
from jaxllm.weights import reader
from jaxllm.weights.blocks import View
from jaxllm.weights.dummy import dummy
from jaxllm.weights.fill import fill, is_small, prepare
from jaxllm.weights.given import GivenArrays
from jaxllm.weights.kept import Kept, digest
from jaxllm.weights.rounding import Rounding, filled_by
from jaxllm.weights.stored import PLAIN_DTYPES

MAX_NAMED_PROBLEMS = 20
COMPARE_BYTES = 2**24
OUTLINES = 16  # of the stages of a model

type Progress = Callable[[int, int], None]
type Source = str | Path | GivenArrays  # a model directory, or arrays in its place


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
    model: Source,
    spec: ModelSpec,
    mesh: Mesh,
    dtype: DTypeLike,
    load_format: str = "auto",
    cache: Path | None = None,
    stages: Sequence[Stage] = (WHOLE,),
) -> None:
    """Raises the ConfigError that `load` would raise, from the files' headers or the arrays' shapes
    and, unless weights of all `stages` are kept in the `cache`, from scales of packed ones."""
    if _reads_files(load_format):
        checkpoint, graph = open_checkpoint(model, spec), _outline(spec, mesh, dtype)
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
    held = held_layers(spec, {*checkpoint.entries, *checkpoint.formats})
    if len(spec.layers) > held:
        problem = f"num_hidden_layers is {len(spec.layers)}, the files hold {held} layers"
        if not held and (names := sorted(checkpoint.entries)):
            problem += (
                f": nothing of {attention_name(spec, 0)}, but {names[-1]:.80}; "
                "correct model_type, or these names"
            )
        problems.append(problem)
    _refuse(checkpoint, problems)


def open_checkpoint(model: Source, spec: ModelSpec) -> reader.Checkpoint:
    """The model's tensors under the names that the rules know."""
    checkpoint = reader.Checkpoint(model)
    checkpoint.rename(read_name(spec, checkpoint.entries))
    if spec.scheme is not None:
        own = [name for name, kind in spec.formats.items() if not kind.rounded]
        held = {*own, *(f"{name}.weight" for name in own)}
        checkpoint.unpack(spec.scheme, held, spellings(spec))
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
    model: Source,
    spec: ModelSpec,
    mesh: Mesh,
    dtype: DTypeLike,
    load_format: str = "auto",
    *,
    seed: int = 0,
    progress: Progress | None = None,
    cache: Path | None = None,
    stage: Stage = WHOLE,
    before: Sequence[jax.Array] = (),
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model, or one stage of it, as (graphdef, state) with arrays on the mesh.

    `progress(done_bytes, total_bytes)` is called after each parameter. "dummy" reads no file and
    draws random weights from `seed`. Packed and rounded weights are read from the `cache` where
    they are kept there, else written to it. Raises one ConfigError that names every missing, extra,
    truncated or wrongly shaped tensor.

    Parameters are written into those of `before`, a state's leaves, as far as there are any; these
    are lost, also when loading fails.
    """
    reads = _reads_files(load_format)
    graph = _outline(spec if reads else spec.rounding(), mesh, dtype, stage)
    likes = graph.likes
    rounding = Rounding(likes, dtype, dict(zip(likes, before, strict=False)))
    placed: dict[str, jax.Array] = {}
    total = sum(like.size * like.dtype.itemsize for like in likes.values())
    filled: Iterator[Mapping[str, jax.Array]]
    unkept: Kept | None = None
    if not reads:
        prepare(graph.rules, rounding)
        rounding.take_room(_written(graph.rules, likes))
        plain = dummy(graph.rules, [rounding.like(rule) for rule in graph.rules], seed)
        filled = map(rounding.finished, graph.rules, plain)
    else:
        checkpoint = open_checkpoint(model, spec)
        table = _held(checkpoint, graph.rules)
        view: View = checkpoint.view
        entry = _entry(cache, spec, checkpoint, graph)
        if entry is not None and (found := entry.found(likes)) is not None:
            table, view = found
        else:
            unkept = entry
            if stage == WHOLE:  # the rules of a stage know only their own tensors
                _check(checkpoint, table, spec)
        large = [name for name, like in likes.items() if not is_small(like)]
        rounding.take_room(dict.fromkeys([*large, *_written(table, likes)]))
        filled = fill(table, rounding, view)
    for arrays in filled:
        placed.update(arrays)
        if progress:
            progress(sum(array.nbytes for array in placed.values()), total)
    if unkept is not None:
        unkept.keep(placed)
    return graph.filled(placed)


def _written(rules: Iterable[Rule], likes: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
    """The parameters that weights are rounded into."""
    return [name for rule in rules if rule.rounded for name in filled_by(rule, likes)]


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
    packed = spec.formats or spec.scheme is not None
    if cache is None or checkpoint.directory is None or not packed or jax.process_count() > 1:
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


class _Same:
    """A value that is equal to itself alone."""

    def __init__(self, value: ModelSpec):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def _outline(spec: ModelSpec, mesh: Mesh, dtype: DTypeLike, stage: Stage = WHOLE) -> _Outline:
    """Made once for a start and all later changes of weights: of a model of 28 layers it takes as
    long as copying 2 GB."""
    return _made_outline(_Same(spec), mesh, np.dtype(dtype), stage)


@functools.lru_cache(OUTLINES)
def _made_outline(same: _Same, mesh: Mesh, dtype: np.dtype, stage: Stage) -> _Outline:
    spec = same.value
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


def _held(checkpoint: reader.Checkpoint, rules: list[Rule]) -> list[Rule]:
    """The rules in the forms that the checkpoint holds."""
    names = checkpoint.entries
    held = (rule.for_tensors(names) for rule in rules)
    return [replace(rule, pieces=tuple(map(checkpoint.piece, rule.pieces))) for rule in held]


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
    # Modules of width 0 are written, too, and have no effect
    strange = [name for name in strange if 0 not in found[name].shape]
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
        where = checkpoint.directory
        whose = (
            "the arrays given do not fit the model"
            if where is None
            else f"checkpoint {where} does not fit its config.json"
        )
        raise ConfigError(f"{whose}: {'; '.join(listing)}")


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
