"""The scales of 8-bit keys and values that a checkpoint brings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxllm.cache.layer import ScaleTensors
from jaxllm.config import ConfigError
from jaxllm.models import ModelSpec
from jaxllm.models.config.build import kv_scale_names
from jaxllm.weights.load import open_checkpoint
from jaxllm.weights.reader import Checkpoint
from jaxllm.weights.stored import PLAIN_DTYPES, Entry

LEAST, MOST = 2.0**-64, 2.0**64
REMEDY = "mend the checkpoint, or give the model's type as --kv-cache-dtype (bfloat16)"


def kv_scales(
    model_dir: str | Path, spec: ModelSpec, load_format: str = "auto"
) -> list[ScaleTensors | None]:
    """The tensors with the scales of each layer's keys and values, None for a layer without.

    A tensor holds one number, or one for each of the model's KV heads. The list is empty when no
    layer has scales, and when the files have faults, which `check` names. Raises ConfigError for
    scales that cannot be used.
    """
    checkpoint = None if load_format == "dummy" else open_checkpoint(model_dir, spec)
    if checkpoint is None or checkpoint.problems:
        return []
    entries = checkpoint.entries
    found = [_layer_scales(checkpoint, entries, spec, layer) for layer in range(len(spec.layers))]
    return found if any(found) else []


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
