"""Tiny checkpoints that bring scales for 8-bit keys and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.goldens.golden import load_golden

LLAMA = load_golden("llama-gqa").directory  # two layers
HEADS = 2  # of keys, and of values
# Of each layer's keys and values
SCALES = np.array([[0.083, 0.0213], [0.0911, 0.0341]], np.float32)
STORED = np.asarray(jnp.asarray(SCALES, jnp.bfloat16), np.float32)
BY_HEAD = SCALES[..., None] * np.array([1, 1.75], np.float32)


def checkpoint(path: Path, extra: dict[str, Any], **config: Any) -> str:
    """The tiny Llama with more tensors in layers named by number, and more in config.json."""
    more = {f"model.layers.{name}": value for name, value in extra.items()}
    return extended(LLAMA, path, more, **config)


def extended(model: Path, path: Path, extra: dict[str, Any], **config: Any) -> str:
    """A tiny model with more tensors, and more in config.json."""
    tensors = load_file(model / "model.safetensors")
    tensors |= {name: np.asarray(value, np.float32) for name, value in extra.items()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(
        json.dumps(json.loads((model / "config.json").read_text()) | config)
    )
    return str(path)


def named(key: str, value: str, layers: int = 2, shape: tuple[int, ...] = ()) -> dict[str, Any]:
    names = [
        (f"{layer}.self_attn.{name}", SCALES[layer, side])
        for layer in range(layers)
        for side, name in enumerate((key, value))
    ]
    return {name: np.full(shape, scale) for name, scale in names}


def by_head(shape: tuple[int, ...]) -> dict[str, Any]:
    names = [
        (layer, side, f"{layer}.self_attn.{name}")
        for layer in range(2)
        for side, name in enumerate(("k_scale", "v_scale"))
    ]
    return {name: BY_HEAD[layer, side].reshape(shape) for layer, side, name in names}
