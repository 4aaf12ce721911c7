"""Scales and orders that cannot be are named before anything is placed on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import models, weights
from jaxllm.config import ConfigError
from jaxllm.mesh import make_mesh, stages
from tests.weights.packed import (
    FP8,
    FP8_STATIC,
    MXFP4,
    Pair,
    fp8_pair,
    fp8_tensor_pair,
    mxfp4_pair,
    write,
)
from tests.weights.test_grouped import pair

UP = "model.layers.1.mlp.up_proj"
DOWN = "model.layers.1.mlp.experts.down_proj_scales"
MODELS: dict[str, Callable[[], tuple[Pair, dict[str, Any]]]] = {
    "blocks": lambda: (fp8_pair("llama-gqa"), FP8),
    "static": lambda: (fp8_tensor_pair("llama-gqa", static=True), FP8_STATIC),
    "mxfp4": lambda: (mxfp4_pair(), MXFP4),
    **{
        kind: lambda kind=kind: pair("llama-gqa", kind)
        for kind in ("awq", "gptq with groups in no order", "gptq of 8 bits", "pack-quantized")
    },
}


def directory(path: Path, kind: str, name: str, value: Any) -> Path:
    """A checkpoint with this value as the first of a tensor."""
    made, settings = MODELS[kind]()
    changed = made.packed[name].copy()
    changed.reshape(-1)[0] = value
    config = made.config | {"quantization_config": settings}
    return write(path, config, made.packed | {name: changed})


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        ("blocks", f"{UP}.weight_scale_inv", np.nan, "weight_scale_inv has the scale nan"),
        ("static", f"{UP}.weight_scale", np.inf, "weight_scale has the scale inf"),
        ("static", f"{UP}.input_scale", -1, "input_scale has the scale -1"),
        ("static", f"{UP}.input_scale", 0, "input_scale is 0; scales of inputs are above 0"),
        ("mxfp4", DOWN, 255, "down_proj_scales has the exponent 255"),
        ("awq", f"{UP}.scales", np.nan, "scales has the scale nan; scales are finite: download"),
        ("gptq of 8 bits", f"{UP}.scales", np.inf, "scales has the scale inf"),
        ("gptq with groups in no order", f"{UP}.g_idx", 99, "g_idx has the group 99; there are 2"),
        ("pack-quantized", f"{UP}.weight_shape", 7, r"weight_shape is \[7, 32\], the numbers"),
    ],
)
@pytest.mark.parametrize("held", [True, False])
def test_values_that_cannot_be_are_named_before_weights_are_loaded(
    tmp_path: Path, kind: str, name: str, value: Any, message: str, held: bool
) -> None:
    path = directory(tmp_path / "model", kind, name, value)
    spec = models.read_spec(path)
    if held:
        spec = replace(spec, formats=weights.weight_formats(path, spec, None))
        assert spec.formats
    elif name.endswith("input_scale"):
        return  # weights of plain numbers have no use for it
    with pytest.raises(ConfigError, match=message) as error:
        weights.check(path, weights.outline(spec, make_mesh(1), jnp.float32))
    assert name in str(error.value)
    assert "again" in str(error.value)


def test_weights_that_are_kept_are_not_read_to_be_checked(tmp_path: Path) -> None:
    path = directory(tmp_path / "model", "awq", f"{UP}.scales", np.nan)
    spec, mesh, cache = models.read_spec(path), make_mesh(1), tmp_path / "kept"
    spec = replace(spec, formats=weights.weight_formats(path, spec, None))
    entry = weights.kept_entry(path, weights.outline(spec, mesh, jnp.float32), cache)
    assert entry is not None
    entry.folder.mkdir(parents=True)
    weights.check(path, weights.outline(spec, mesh, jnp.float32), cache=cache)


def test_weights_of_which_one_stage_alone_is_kept_are_checked(tmp_path: Path) -> None:
    path = directory(tmp_path / "model", "awq", f"{UP}.scales", np.nan)
    spec, mesh, cache = models.read_spec(path), make_mesh(1), tmp_path / "kept"
    spec = replace(spec, formats=weights.weight_formats(path, spec, None))
    for stage in stages(2):
        with pytest.raises(ConfigError, match="scales"):
            weights.check(path, weights.outline(spec, mesh, jnp.float32, stages(2)[0]), cache=cache)
        entry = weights.kept_entry(path, weights.outline(spec, mesh, jnp.float32, stage), cache)
        assert entry is not None
        entry.folder.mkdir(parents=True)
    weights.check(path, weights.outline(spec, mesh, jnp.float32, stages(2)[0]), cache=cache)
