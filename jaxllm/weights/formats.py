"""What weights are held in: the type of plain numbers, and which are held in few bits."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxllm.config import DTYPES, ConfigError
from jaxllm.models import ModelSpec
from jaxllm.models.config.build import (
    expert_maps,
    head_name,
    linear_maps,
    outline,
    table_name,
)
from jaxllm.nn.linear import Tensors
from jaxllm.nn.pooling import PoolingModel
from jaxllm.nn.rules import Layout
from jaxllm.nn.weight.table import takes, takes_head
from jaxllm.quantisation import ONLINE, Scheme, WeightFormat
from jaxllm.quantisation.matrix import NUMBERS
from jaxllm.weights.model_files import Model, opened
from jaxllm.weights.reader import Checkpoint, named

LEAST_ROWS = 16  # gates of fewer outputs stay plain, unless their inputs are rounded


def resolve_dtype(requested: str, stored: str | None, platform: str) -> jnp.dtype:
    """The dtype of weights and KV.

    "auto" is float32 on CPU. Elsewhere it is float16 for a checkpoint `stored` in that, and
    bfloat16 for every other.
    """
    if requested not in DTYPES:
        raise ConfigError(
            f"dtype {requested!r} is not supported; choose one of {', '.join(DTYPES)}"
        )
    name = {"half": "float16", "float": "float32"}.get(requested, requested)
    if name == "auto":
        if platform == "cpu":
            name = "float32"
        elif stored == "float16":
            name = stored
        else:
            name = "bfloat16"
    return jnp.dtype(name)


def weight_formats(
    model: Model, spec: ModelSpec, wish: str | None, load_format: str = "auto"
) -> dict[str, WeightFormat]:
    """`ModelSpec.formats` for a checkpoint, and for the `wish` for `--quantization`.

    Packed weights of linear maps are held as they are stored; those of experts if all parts of a
    map are alike, and maps with few outputs only where plain numbers would not give the same. So
    are tables of tokens, and heads of 8 bits whose products are summed to float32.
    Files that cannot be read are left to `check`. Raises ConfigError for a wish that does not fit
    the checkpoint.
    """
    if spec.scheme is not None and wish not in (None, spec.scheme.method):
        raise ConfigError(
            f"--quantization {wish:.80} does not fit the checkpoint, whose weights are packed as "
            f"{spec.scheme.method}; leave it out"
        )
    if spec.scheme is None:
        if wish is None:
            return {}
        return _online(spec, wish)
    maps = list(_maps(spec))
    if load_format == "dummy":
        formats = _likely(spec.scheme, [weight_map.pieces for weight_map in maps])
        ends: dict[str, WeightFormat] = {}
    else:
        with opened(model) as files:
            checkpoint = named(files, spec)
            formats = {**checkpoint.formats}
            for weight_map in maps:
                formats |= _apart(weight_map, checkpoint)
            ends = _ends(spec, formats, checkpoint.entries)
    return ends | {
        name.removesuffix(".weight"): weight_format
        for weight_map in maps
        for name, weight_format in _of_map(weight_map, formats)
        if not weight_map.is_small or weight_format.inputs != "plain"
    }


def _ends(
    spec: ModelSpec, formats: Mapping[str, WeightFormat | None], stored: Container[str]
) -> dict[str, WeightFormat]:
    """What the table of tokens and the head are held in, where these are packed."""
    table = table_name(spec)
    head = head_name(spec)
    is_head = {table: spec.tied and spec.has_head}
    if spec.tied and f"{head}.weight" in stored:  # which must equal the table
        return {}
    if spec.has_head and not spec.tied:
        is_head[head] = True
    ends = {name: formats.get(f"{name}.weight") for name in is_head}
    return {
        name: weight_format
        for name, weight_format in ends.items()
        if weight_format is not None
        and (takes_head(weight_format, spec.width) if is_head[name] else takes(weight_format))
    }


# The names and shapes of the plain tensors that fill a map
type _Pieces = dict[str, tuple[int, ...]]


class _Map(NamedTuple):
    pieces: _Pieces
    is_small: bool = False  # it has few outputs
    of_experts: bool = False


class _Header(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def _likely(scheme: Scheme, maps: list[_Pieces]) -> dict[str, WeightFormat | None]:
    """What a checkpoint's matrices would be held in if it packed them all, for random weights."""
    plain = {name: shape for pieces in maps for name, shape in pieces.items()}
    formats = {name: scheme.usual(shape) for name, shape in plain.items()}
    for dtype in NUMBERS:
        stored = {name: _Header(dtype, shape) for name, shape in plain.items()}
        formats |= {tensor.name: tensor.format for tensor in scheme.tensors(stored)}
    return formats


def _online(spec: ModelSpec, wish: str) -> dict[str, WeightFormat]:
    if wish not in ONLINE:
        raise ConfigError(
            f"--quantization {wish:.80} does not fit the checkpoint, whose weights are plain: "
            f"{', '.join(ONLINE)} round them; leave it out to keep them"
        )
    return {
        name.removesuffix(".weight"): ONLINE[wish]
        for weight_map in _maps(spec, rounded=True)
        if not weight_map.is_small
        for name in weight_map.pieces
    }


def _maps(spec: ModelSpec, rounded: bool = False) -> Iterator[_Map]:
    """The maps that may be held in few bits, those of experts in each of their forms; and, of plain
    weights that are `rounded`, those whose matrices are stored as [in, out]."""
    model = outline(spec, 1, np.float32)
    body = model.body if isinstance(model, PoolingModel) else model
    for _, linear, names in linear_maps(spec, body):
        if rounded or linear.layout is not Layout.IN_OUT:
            pieces = {piece.name: piece.source for piece in Tensors(linear, names)("weight")}
            yield _Map(pieces, math.prod(linear.out) < LEAST_ROWS)
    for _, _, forms in expert_maps(spec, body):
        for form in forms:
            pieces = {piece.name: piece.source for piece in form("weight")}
            yield _Map(pieces, of_experts=True)


def _of_map(
    weight_map: _Map, formats: Mapping[str, WeightFormat | None]
) -> Iterator[tuple[str, WeightFormat]]:
    """Tensors of a map and what they are held in."""
    tensor_formats = {name: formats.get(name) for name in weight_map.pieces}
    if weight_map.of_experts and not _alike(set(tensor_formats.values())):
        return
    yield from (
        (name, weight_format)
        for name, weight_format in tensor_formats.items()
        if weight_format is not None
    )


def _apart(weight_map: _Map, checkpoint: Checkpoint) -> dict[str, WeightFormat]:
    """The formats of a map's tensors whose inputs have unlike scales: rounding is then not one for
    all. Those of experts are told apart where they are multiplied."""
    tensor_formats = {name: checkpoint.formats.get(name) for name in weight_map.pieces}
    scaled = {
        name: weight_format
        for name, weight_format in tensor_formats.items()
        if weight_format and weight_format.inputs == "given"
    }
    if weight_map.of_experts or len(scaled) < 2:
        return {}
    scales = {name: checkpoint.input_scale(name) for name in scaled}
    if len(set(scales.values())) == 1:
        return {}
    return {
        name: replace(weight_format, input_scale=scales[name])
        for name, weight_format in scaled.items()
    }


def _alike(kinds: set[WeightFormat | None]) -> bool:
    """Whether weights of all experts can be held as one."""
    return len(kinds) == 1 and all(
        weight_format is None or weight_format.ordered for weight_format in kinds
    )
