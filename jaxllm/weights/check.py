"""Whether a checkpoint is one of a model, and what is wrong with it in one error."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxllm.config import LOAD_FORMATS, ConfigError
from jaxllm.mesh import stages
from jaxllm.models import ModelSpec
from jaxllm.models.config import build
from jaxllm.nn.rules import Piece, Rule
from jaxllm.weights.kept import kept_at
from jaxllm.weights.model_files import Model, opened
from jaxllm.weights.outline import Outline
from jaxllm.weights.reader import Checkpoint, named
from jaxllm.weights.stored import PLAIN_DTYPES

MAX_NAMED_PROBLEMS = 20
COMPARE_BYTES = 2**24


def reads_files(load_format: str) -> bool:
    """Whether weights are read at all. Raises ConfigError for an unknown format."""
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format {load_format!r} is not supported; choose one of {', '.join(LOAD_FORMATS)}"
        )
    return load_format != "dummy"


def check(
    model: Model, outline: Outline, load_format: str = "auto", cache: Path | None = None
) -> None:
    """Raises the ConfigError that `load` would raise, from the files' headers or the arrays' shapes
    and, unless weights of all stages are kept in the `cache`, from scales of packed ones."""
    if not reads_files(load_format):
        return
    with opened(model) as files:
        checkpoint = named(files, outline.spec)
        check_tensors(checkpoint, checkpoint.stored_rules(outline.model_rules), outline.spec)
        # Without a cache no other stage is outlined
        parts = map(outline.at, stages(outline.stage.count)) if cache is not None else ()
        entries = [kept_at(cache, checkpoint, part) for part in parts]
        if not entries or not all(entry and entry.folder.is_dir() for entry in entries):
            checkpoint.check_values()


def check_shapes(model: Model, spec: ModelSpec, load_format: str = "auto") -> None:
    """Raises ConfigError when the files hold tensors of other sizes, or fewer layers, than the spec
    says.

    Only one layer is looked at, so that absurd sizes are refused in no time, before anything is
    built. Files that cannot be read are left to `check`.
    """
    if not reads_files(load_format):
        return
    with opened(model) as files:
        checkpoint = named(files, spec)
        if checkpoint.problems:
            return
        first = spec.first_layers(1)
        rules = build.rules(first, build.outline(first, 1, np.float32))
        pieces = [piece for rule in checkpoint.stored_rules(rules) for piece in rule.pieces]
        problems = _mismatches(checkpoint, pieces)
        held = build.held_layers(spec, {*checkpoint.entries, *checkpoint.formats})
        if len(spec.layers) > held:
            problem = f"num_hidden_layers is {len(spec.layers)}, the files hold {held} layers"
            if not held and (names := sorted(checkpoint.entries)):
                problem += (
                    f": nothing of {build.attention_name(spec, 0)}, but {names[-1]:.80}; "
                    "correct model_type, or these names"
                )
            problems.append(problem)
        _refuse(checkpoint, problems)


def check_tensors(checkpoint: Checkpoint, rules: list[Rule], spec: ModelSpec) -> None:
    """Raises ConfigError unless every tensor of the checkpoint has a use, and every piece a tensor
    of its shape."""
    problems = list(checkpoint.problems)
    entries = checkpoint.entries
    needless = build.ignored(spec)
    pieces = [piece for rule in rules for piece in rule.pieces]
    expected = {piece.name for piece in pieces}
    head = f"{build.head_name(spec)}.weight"
    remedy = {head: " (where the embedding is the head, set tie_word_embeddings to true)"}
    problems += [f"missing {n}{remedy.get(n, '')}" for n in checkpoint.missing(expected)]
    strange = sorted(set(entries) - expected - set(needless))
    # Modules of width 0 are written, too, and have no effect
    strange = [name for name in strange if 0 not in entries[name].shape]
    strange = [name for name in strange if not name.startswith(build.unused_prefixes(spec))]
    problems += [f"unexpected {name}" for name in strange if not checkpoint.is_zero_bias(name)]
    problems += _mismatches(checkpoint, pieces)
    if not problems:
        problems = [
            f"{name} differs from {twin} although tie_word_embeddings is true; "
            "set it to false in config.json"
            for name, twin in needless.items()
            if name in entries and twin is not None and not _equal(checkpoint, name, twin)
        ]
    _refuse(checkpoint, problems)


def _mismatches(checkpoint: Checkpoint, pieces: list[Piece]) -> list[str]:
    """Pieces whose tensors are there, but not as they are expected."""
    entries = checkpoint.entries
    known = tuple(PLAIN_DTYPES)
    pairs = [(piece, entries.get(piece.name)) for piece in pieces]
    problems = (mismatch(piece, entry.dtype, entry.shape, known) for piece, entry in pairs if entry)
    return list(dict.fromkeys(problem for problem in problems if problem))


def mismatch(
    piece: Piece, dtype: str, shape: tuple[int, ...], known: tuple[str, ...]
) -> str | None:
    """Why a checkpoint tensor cannot be this piece, or None. `known` are the readable dtypes."""
    if shape != piece.source:
        return f"{piece.name} has shape {list(shape)}, expected {list(piece.source)}"
    if dtype not in known:
        return f"{piece.name} has dtype {dtype}, which is not one of {', '.join(known)}"
    return None


def _refuse(checkpoint: Checkpoint, problems: list[str]) -> None:
    """Raises one ConfigError that names the problems, if there are any."""
    if not problems:
        return
    listing = [problem[:200] for problem in problems[:MAX_NAMED_PROBLEMS]]
    others = len(problems) - MAX_NAMED_PROBLEMS
    if others > 0:
        listing.append(f"and {others} more")
    subject = "the arrays given do not fit the model"
    if checkpoint.directory is not None:
        subject = f"checkpoint {checkpoint.directory} does not fit its config.json"
    raise ConfigError(f"{subject}: {'; '.join(listing)}")


def _equal(checkpoint: Checkpoint, name: str, twin: str) -> bool:
    """Whether two tensors are there as plain numbers, and equal; compared in parts for memory."""
    entry = checkpoint.entries[name]
    other_entry = checkpoint.entries.get(twin)
    if other_entry is None or entry.shape != other_entry.shape or entry.dtype not in PLAIN_DTYPES:
        return False
    left = np.asarray(checkpoint.view(name)).reshape(-1)
    right = np.asarray(checkpoint.view(twin)).reshape(-1)
    step = COMPARE_BYTES // left.itemsize
    return all(
        np.array_equal(left[first : first + step], right[first : first + step])
        for first in range(0, left.size, step)
    )
