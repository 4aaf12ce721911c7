"""The scales of 8-bit keys and values that a checkpoint brings."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxllm.cache.layer import ScaleTensors
from jaxllm.config import ConfigError
from jaxllm.models import ModelSpec
from jaxllm.models.config.build import kv_scale_names
from jaxllm.weights.model_files import Model, opened
from jaxllm.weights.reader import Checkpoint, named
from jaxllm.weights.stored import PLAIN_DTYPES, Entry

LEAST = 2.0**-64
MOST = 2.0**64
REMEDY = "mend the checkpoint, or give the model's type as --kv-cache-dtype (bfloat16)"


def kv_scales(
    model: Model, spec: ModelSpec, load_format: str = "auto"
) -> list[ScaleTensors | None]:
    """The tensors with the scales of each layer's keys and values, None for a layer without.

    A tensor holds one number, or one for each of the model's KV heads. The list is empty when no
    layer has scales, and when the files have faults, which `check` names. Raises ConfigError for
    scales that cannot be used.
    """
    if load_format == "dummy":
        return []
    with opened(model) as files:
        checkpoint = named(files, spec)
        if checkpoint.problems:
            return []
        layers = range(len(spec.layers))
        entries = checkpoint.entries
        scales = [_layer_scales(checkpoint, entries, spec, layer) for layer in layers]
    if any(scales):
        return scales
    return []


def _layer_scales(
    checkpoint: Checkpoint, entries: Mapping[str, Entry], spec: ModelSpec, layer: int
) -> ScaleTensors | None:
    if layer not in spec.attention_layers:
        return None
    heads = spec.heads(1, layer).kv
    for pair in kv_scale_names(spec, layer):
        there = [name for name in pair if name in entries]
        if len(there) == 1:
            raise ConfigError(
                f"checkpoint {checkpoint.directory} has {there[0]}, "
                f"but not the other of {' and '.join(pair)}; {REMEDY}"
            )
        if there:
            return tuple((name, _checked(checkpoint, name, entries[name], heads)) for name in pair)
    return None


def _checked(checkpoint: Checkpoint, name: str, entry: Entry, heads: int) -> tuple[int, ...]:
    """The shape of the tensor `name`. Raises ConfigError when its values cannot be scales."""
    if entry.dtype not in PLAIN_DTYPES or [size for size in entry.shape if size != 1] not in (
        [],
        [heads],
    ):
        raise ConfigError(
            f"checkpoint {checkpoint.directory}: {name} is {entry.dtype} {list(entry.shape)}; "
            f"numbers of {', '.join(PLAIN_DTYPES)} are expected, "
            f"one for all of a layer's KV heads or one for each of the {heads}; {REMEDY}"
        )
    for value in np.asarray(checkpoint.view(name), float).reshape(-1):
        if not LEAST <= value <= MOST:
            raise ConfigError(
                f"checkpoint {checkpoint.directory}: {name} is {value}; "
                f"a scale lies between 2^-64 and 2^64; {REMEDY}"
            )
    return entry.shape
