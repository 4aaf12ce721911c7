"""From a configuration and a model directory to a model on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.config import DTYPES, LOAD_FORMATS, ConfigError
from jaxllm.mesh import sharding
from jaxllm.models import (
    KV_SCALES,
    KVTensors,
    Rule,
    family,
    kv_scales_rule,
    kv_shape,
    with_defaults,
)
from jaxllm.nn.decoder import Decoder
from jaxllm.weights import reader
from jaxllm.weights.dummy import dummy
from jaxllm.weights.place import mismatch, place

MAX_NAMED_PROBLEMS = 20
COMPARE_BYTES = 2**24
# 14 GiB onto one GPU from the page cache: 6.1 s with one thread, 2.2 s with four, 1.6 s with eight
READERS = 4

type Progress = Callable[[int, int], None]


def resolve_dtype(requested: str, hf: Mapping[str, Any], platform: str) -> jnp.dtype:
    """The dtype of weights and KV. "auto" is float32 on CPU and the checkpoint's dtype elsewhere,
    where float32 becomes bfloat16."""
    if requested not in DTYPES:
        raise ConfigError(
            f"dtype {requested!r} is not supported; choose one of {', '.join(DTYPES)}"
        )
    name = {"half": "float16", "float": "float32"}.get(requested, requested)
    if name == "auto":
        stored = str(hf.get("dtype") or hf.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        name = "float32" if platform == "cpu" else stored if stored == "float16" else "bfloat16"
    return jnp.dtype(name)


def abstract(hf: Mapping[str, Any], mesh: Mesh, dtype: DTypeLike) -> tuple[nnx.GraphDef, nnx.State]:
    """The model as (graphdef, state) whose leaves are ShapeDtypeStructs with shardings: enough to
    compile."""
    graphdef, state, _ = _abstract(with_defaults(hf), mesh, dtype)
    return graphdef, state


def check(
    model_dir: str | Path,
    hf: Mapping[str, Any],
    mesh: Mesh,
    dtype: DTypeLike,
    load_format: str = "auto",
) -> None:
    """Raises the ConfigError that `load` would, from the files' headers alone: before anything is
    compiled or read."""
    if _reads_files(load_format):
        full = with_defaults(hf)
        rules = _rules(full, mesh, set(_abstract(full, mesh, dtype)[2]))
        _check(
            reader.Checkpoint(model_dir),
            rules,
            family(full["model_type"]).ignored(full, mesh.shape["tensor"]),
        )


def _reads_files(load_format: str) -> bool:
    if load_format not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format {load_format!r} is not supported; choose one of {', '.join(LOAD_FORMATS)}"
        )
    return load_format != "dummy"


def load(
    model_dir: str | Path,
    hf: Mapping[str, Any],
    mesh: Mesh,
    dtype: DTypeLike,
    load_format: str = "auto",
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model as (graphdef, state) with arrays on the mesh.

    `progress(done_bytes, total_bytes)` is called after each parameter. "dummy" reads no file and
    draws random weights from `seed`. Raises one ConfigError that names every missing, extra,
    truncated or wrongly shaped tensor.
    """
    full = with_defaults(hf)
    graphdef, state, likes = _abstract(full, mesh, dtype)
    rules = _rules(full, mesh, set(likes))
    if not _reads_files(load_format):
        arrays = dummy(rules, [likes[rule.parameter] for rule in rules], seed)
    else:
        checkpoint = reader.Checkpoint(model_dir)
        _check(checkpoint, rules, family(full["model_type"]).ignored(full, mesh.shape["tensor"]))
        arrays = _place_all(rules, likes, checkpoint)
    placed, done, total = {}, 0, sum(_bytes(like) for like in likes.values())
    for rule, array in zip(rules, arrays, strict=True):
        placed[rule.parameter] = array
        done += _bytes(array)
        if progress:
            progress(done, total)
    return graphdef, jax.tree.unflatten(jax.tree.structure(state), [placed[name] for name in likes])


def _abstract(
    full: dict[str, Any], mesh: Mesh, dtype: DTypeLike
) -> tuple[nnx.GraphDef, nnx.State, dict[str, jax.ShapeDtypeStruct]]:
    """Graph, abstract state, and the state's leaves by dotted path in flatten order."""
    module = family(full["model_type"])

    def build() -> Decoder:
        model: Decoder = module.build(full, mesh.shape["tensor"], nnx.Rngs(0), dtype)
        for layer in _scaled(full):
            model.layers[layer].attention.take_kv_scales()
        return model

    model = nnx.eval_shape(build)
    graphdef, state = nnx.split(model)
    parameters, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    likes = {}
    for path, parameter in parameters:
        shape = parameter.get_value()
        where = sharding(mesh, parameter.get_metadata("axes"))
        likes[".".join(str(getattr(key, "key", key)) for key in path)] = jax.ShapeDtypeStruct(
            shape.shape, shape.dtype, sharding=where
        )
    return graphdef, jax.tree.unflatten(jax.tree.structure(state), list(likes.values())), likes


def _scaled(full: Mapping[str, Any]) -> dict[int, KVTensors]:
    """The layers whose keys and values have scales in the checkpoint, which are to be used."""
    return {layer: tensors for layer, tensors in enumerate(full.get(KV_SCALES, ())) if tensors}


def _rules(full: dict[str, Any], mesh: Mesh, parameters: set[str]) -> list[Rule]:
    """The family's table, which must produce every parameter exactly once."""
    rules = family(full["model_type"]).rules(full, mesh.shape["tensor"])
    heads = kv_shape(full, mesh.shape["tensor"]).kv_heads
    rules += [kv_scales_rule(layer, tensors, heads) for layer, tensors in _scaled(full).items()]
    made = [rule.parameter for rule in rules]
    if set(made) != parameters or len(made) != len(parameters):
        raise RuntimeError(
            f"the rules of {full['model_type']} and its parameters differ: {sorted(set(made) ^ parameters)[:5]}"
        )
    return rules


def _place_all(
    rules: list[Rule], likes: Mapping[str, jax.ShapeDtypeStruct], checkpoint: reader.Checkpoint
) -> Iterator[jax.Array]:
    """Every parameter in turn. Each thread holds one on the host until its devices have it: some
    copy while others transfer."""
    with ThreadPoolExecutor(READERS, thread_name_prefix="weights") as pool:
        yield from pool.map(
            lambda rule: jax.block_until_ready(place(rule, likes[rule.parameter], checkpoint.view)),
            rules,
        )


def _check(
    checkpoint: reader.Checkpoint, rules: list[Rule], ignored: Mapping[str, str | None]
) -> None:
    """Every tensor of the checkpoint has a use, and every piece a tensor of its shape."""
    problems, found = list(checkpoint.problems), checkpoint.entries
    pieces = [piece for rule in rules for piece in rule.pieces]
    expected = {piece.name for piece in pieces}
    problems += [f"missing {name}" for name in checkpoint.missing(expected)]
    problems += [f"unexpected {name}" for name in sorted(set(found) - expected - set(ignored))]
    for piece in pieces:
        if piece.name in found:
            entry = found[piece.name]
            if problem := mismatch(piece, entry.dtype, entry.shape, tuple(reader.DTYPES)):
                problems.append(problem)
    if not problems:
        problems = [
            f"{name} differs from {other} although tie_word_embeddings is true; set it to false in config.json"
            for name, other in ignored.items()
            if name in found and other is not None and not _equal(checkpoint, name, other)
        ]
    if problems:
        more = (
            f"; and {len(problems) - MAX_NAMED_PROBLEMS} more"
            if len(problems) > MAX_NAMED_PROBLEMS
            else ""
        )
        listing = "; ".join(problem[:200] for problem in problems[:MAX_NAMED_PROBLEMS])
        raise ConfigError(
            f"checkpoint {checkpoint.directory} does not fit its config.json: {listing}{more}"
        )


def _equal(checkpoint: reader.Checkpoint, name: str, other: str) -> bool:
    """Whether two tensors hold the same values, compared in parts."""
    if (
        checkpoint.entries[name].shape != checkpoint.entries[other].shape
        or checkpoint.entries[name].dtype not in reader.DTYPES
    ):
        return False
    left, right = checkpoint.view(name).reshape(-1), checkpoint.view(other).reshape(-1)
    step = COMPARE_BYTES // left.itemsize
    return all(
        np.array_equal(left[at : at + step], right[at : at + step])
        for at in range(0, left.size, step)
    )


def _bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    return int(np.prod(array.shape)) * array.dtype.itemsize
