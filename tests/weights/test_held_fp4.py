"""Matrices of 4-bit floats, as compressed-tensors and modelopt store them, stay in 4 bits on the
devices and compute what their values do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxllm import models
from jaxllm.config import ConfigError
from jaxllm.quantisation import WeightFormat, read_scheme
from tests.goldens.cases import CASES
from tests.weights.packed import Pair, Tensors, random_tensors, write
from tests.weights.test_held import held, logits
from tests.weights.test_packed import both, load

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def compressed(form: str, group: int, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "group_size": group} | more
    inputs = {"num_bits": 4, "type": "float", "dynamic": "local", "group_size": group}
    own = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": own},
        "ignore": ["lm_head"],
    }


KINDS = {
    "nvfp4": (compressed("nvfp4-pack-quantized", 16), 16),
    "mxfp4": (compressed("mxfp4-pack-quantized", 32), 32),
    "modelopt": (MODELOPT, 16),
}


def matrix(kind: str, shape: tuple[int, int], group: int) -> tuple[Tensors, np.ndarray]:
    """The tensors of a module X, and its weight."""
    rng, (rows, columns) = np.random.default_rng(0), shape
    code = rng.integers(0, 16, shape, np.uint8)
    values = E2M1[code & 7] * np.where(code & 8, np.float32(-1), np.float32(1))
    packed = code[:, 0::2] | code[:, 1::2] << 4
    groups = (rows, -(-columns // group))
    if kind == "mxfp4":
        scale = rng.integers(118, 124, groups, np.uint8)
        stored = {"weight_packed": packed, "weight_scale": scale}
        wide = np.exp2(scale.astype(np.float32) - 127)
    else:
        scale = rng.uniform(16, 448, groups).astype(ml_dtypes.float8_e4m3fn)
        whole = np.float32(rng.uniform(2000, 9000))
        wide = scale.astype(np.float32)
        if kind == "nvfp4":
            stored = {"weight_packed": packed, "weight_scale": scale}
            stored |= {"weight_global_scale": np.array([whole], np.float32)}
            stored |= {"input_global_scale": np.array([9], np.float32)}
            wide = wide / whole
        else:
            factor = np.array(1 / whole, np.float32)
            stored = {"weight": packed, "weight_scale": scale, "weight_scale_2": factor}
            stored |= {"input_scale": np.array(0.1, np.float32)}
            wide = wide * factor
    return stored, values * np.repeat(wide, group, axis=1)[:, :columns]


def pair(case: str, kind: str) -> tuple[Pair, dict[str, Any], int]:
    """The configuration of a golden with its projections as 4-bit floats."""
    settings, group = KINDS[kind]
    config = CASES[case]
    plain = random_tensors(config)
    packed = dict(plain)
    for name, value in plain.items():
        if value.ndim == 2 and "_proj" in name:
            stored, plain[name] = matrix(kind, (value.shape[0], value.shape[1]), group)
            del packed[name]
            packed |= {name.removesuffix("weight") + leaf: own for leaf, own in stored.items()}
    return Pair(config, plain, packed), settings, group


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case", "shards"),
    [
        ("nvfp4", "llama-gqa", 1),
        ("mxfp4", "llama-gqa", 1),
        ("modelopt", "llama-gqa", 2),
        ("nvfp4", "qwen3-moe-normalised", 1),  # experts of 8 inputs, half a group
        ("modelopt", "glm-biases", 1),
    ],
)
def test_4_bit_floats_compute_what_their_values_do(
    tmp_path: Path, kind: str, case: str, shards: int
) -> None:
    made, settings, group = pair(case, kind)
    path, spec = held(tmp_path, made, settings)
    assert set(spec.formats.values()) == {WeightFormat("fp4", group)}
    found = logits(path, spec, shards)
    plain = write(tmp_path / "plain", made.config, made.plain)
    np.testing.assert_allclose(found, logits(plain, models.read_spec(plain)), atol=2e-5)


@pytest.mark.parametrize("kind", ["nvfp4", pytest.param("modelopt", marks=pytest.mark.slow)])
def test_4_bit_floats_give_the_parameters_of_their_values(tmp_path: Path, kind: str) -> None:
    made, settings, _ = pair("llama-gqa", kind)
    packed, plain = both(tmp_path, made, settings)
    for own, other in zip(load(packed), load(plain), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6)


UP = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("weight_scale", np.ones((48, 3), ml_dtypes.float8_e4m3fn), r"scale has shape \[48, 3\]"),
        (
            "weight_scale",
            np.ones((48, 2), np.float32),
            "has dtype F32, which is not one of F8_E4M3",
        ),
        ("weight_global_scale", None, "missing .*up_proj.weight_global_scale"),
        ("weight_global_scale", np.zeros(1, np.float32), "is 0.0; it is finite and above 0"),
        ("weight_global_scale", np.ones(2, np.float32), r"global_scale has shape \[2\], expected"),
        ("weight_packed", np.ones((48, 9), np.uint8), r"up_proj.weight has shape \[48, 18\], exp"),
    ],
    ids=["shape", "type", "missing", "zero", "several", "columns"],
)
def test_what_is_wrong_with_4_bit_floats_is_named(
    tmp_path: Path, leaf: str, value: np.ndarray | None, message: str
) -> None:
    made, settings, _ = pair("llama-gqa", "nvfp4")
    if value is None:
        del made.packed[UP + leaf]
    else:
        made.packed[UP + leaf] = value
    packed, _ = both(tmp_path, made, settings)
    with pytest.raises(ConfigError, match=message):
        load(packed)


@pytest.mark.parametrize(
    "more", [{"num_bits": 6}, {"group_size": 64}, {"type": "int"}, {"group_size": None}], ids=str
)
def test_sizes_of_4_bit_floats_that_are_not_read_are_named(more: dict[str, Any]) -> None:
    settings = compressed("nvfp4-pack-quantized", 16, **more)
    with pytest.raises(ConfigError, match="floats of 4 bits in groups of 16 or 32 are read"):
        read_scheme("compressed-tensors", settings)
