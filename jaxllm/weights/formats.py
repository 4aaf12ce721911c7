"""Which weights are held in few bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.models import ModelSpec
from jaxllm.models.config.build import linear_maps, outline
from jaxllm.nn.linear import Linear, Tensors
from jaxllm.nn.pooling import PoolingModel
from jaxllm.nn.rules import Layout
from jaxllm.quantisation import ONLINE, Scheme, WeightFormat
from jaxllm.quantisation.matrix import NUMBERS
from jaxllm.weights.load import open_checkpoint

LEAST_ROWS = 16  # gates of fewer outputs stay plain


def weight_formats(
    model_dir: str | Path, spec: ModelSpec, wish: str | None, load_format: str = "auto"
) -> dict[str, WeightFormat]:
    """`ModelSpec.formats` for a checkpoint, and for the `wish` for `--quantization`.

    Packed weights of linear maps are held as they are stored, if all parts of a map are alike.
    Files that cannot be read are left to `check`. Raises ConfigError for a wish that does not fit
    the checkpoint.
    """
    if spec.scheme is not None and wish not in (None, spec.scheme.method):
        raise ConfigError(
            f"--quantization {wish:.80} does not fit the checkpoint, whose weights are packed as "
            f"{spec.scheme.method}; leave it out"
        )
    if spec.scheme is None:
        return {} if wish is None else _online(spec, wish)
    maps = [each for each in _maps(spec) if each[0].layout is not Layout.IN_OUT]
    if load_format == "dummy":
        formats = _likely(spec.scheme, maps)
    else:
        formats = open_checkpoint(model_dir, spec).formats
    return {
        name: kind
        for _, names in maps
        if (kind := _shared(formats, names)) is not None
        for name in names
    }


class _Header(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def _likely(
    scheme: Scheme, maps: list[tuple[Linear, tuple[str, ...]]]
) -> dict[str, WeightFormat | None]:
    """What a checkpoint's matrices would be held in if it packed them all, for random weights."""
    pieces = [piece for linear, names in maps for piece in Tensors(linear, names)("weight")]
    found: dict[str, WeightFormat | None] = {}
    for dtype in NUMBERS:
        stored = {piece.name: _Header(dtype, piece.source) for piece in pieces}
        found |= {tensor.name: tensor.format for tensor in scheme.tensors(stored)}
    return found


def _online(spec: ModelSpec, wish: str) -> dict[str, WeightFormat]:
    if wish not in ONLINE:
        raise ConfigError(
            f"--quantization {wish:.80} is not known; plain weights can be rounded to "
            f"{', '.join(ONLINE)}"
        )
    return {name: ONLINE[wish] for _, names in _maps(spec) for name in names}


def _maps(spec: ModelSpec) -> Iterator[tuple[Linear, tuple[str, ...]]]:
    """The linear maps that may be held in few bits, with the names of their tensors."""
    model = outline(spec, 1, np.float32)
    body = model.body if isinstance(model, PoolingModel) else model
    for _, linear, names in linear_maps(spec, body):
        if math.prod(linear.out) >= LEAST_ROWS:
            yield linear, names


def _shared(
    formats: Mapping[str, WeightFormat | None], names: tuple[str, ...]
) -> WeightFormat | None:
    """The format that all of these tensors have."""
    first, *others = {formats.get(f"{name}.weight") for name in names}
    return None if others else first
