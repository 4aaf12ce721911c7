"""Checkpoints whose weights are packed give the parameters of plain ones, or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm import models, weights
from jaxllm.config import ConfigError
from jaxllm.mesh import make_mesh
from jaxllm.quantisation import Bounds
from jaxllm.quantisation.matrix import ScaledMatrix
from tests.weights.packed import (
    FP8,
    MXFP4,
    Pair,
    Tensors,
    compressed,
    fp8_pair,
    fp8_tensor_pair,
    mxfp4_pair,
    write,
)

LLAMA = "llama-gqa"
LAYER = "model.layers.0"
UP = f"{LAYER}.mlp.up_proj.weight"
EXPERTS = f"{LAYER}.mlp.experts.down_proj"
WRAPPED = ("language_model.model.", "model.language_model.")  # names of a wrapper's tensors


def load(
    path: Path, dtype: jax.typing.DTypeLike = jnp.float32, shards: int = 1
) -> list[np.ndarray]:
    spec = models.read_spec(path)
    weights.check_shapes(path, spec)
    _, state = weights.load(path, weights.outline(spec, make_mesh(shards), dtype))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def both(tmp_path: Path, pair: Pair, quantisation: dict[str, Any]) -> tuple[Path, Path]:
    """Model directories: packed, and plain."""
    packed = pair.config | {"quantization_config": quantisation}
    return (
        write(tmp_path / "packed", packed, pair.packed),
        write(tmp_path / "plain", pair.config, pair.plain),
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("case", "shards"),
    [
        (LLAMA, 1),
        (LLAMA, 8),
        ("glm-biases", 2),
        ("minimax-m2-rotary-dim", 1),
        ("deepseek-v3-groups", 1),
        pytest.param("dots1-window", 1, marks=pytest.mark.slow),
    ],
)
def test_8_bit_blocks_give_the_parameters_of_their_values(
    tmp_path: Path, case: str, shards: int, dtype: jax.typing.DTypeLike
) -> None:
    packed, plain = both(tmp_path, fp8_pair(case), FP8)
    found, expected = load(packed, dtype, shards), load(plain, dtype, shards)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, other, strict=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_4_bit_experts_give_the_parameters_of_their_values(
    tmp_path: Path, dtype: jax.typing.DTypeLike
) -> None:
    packed, plain = both(tmp_path, mxfp4_pair(), MXFP4)
    for own, other in zip(load(packed, dtype), load(plain, dtype), strict=True):
        np.testing.assert_array_equal(own, other, strict=True)


def test_a_shard_unpacks_its_own_values_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = both(tmp_path, pair := fp8_pair(LLAMA), FP8)
    unpacked: list[int] = []
    real = ScaledMatrix.unpack

    def unpack(self: ScaledMatrix, arrays: list[np.ndarray], bounds: Bounds) -> np.ndarray:
        unpacked.append(int(np.prod([high - low for low, high in bounds])))
        return real(self, arrays, bounds)

    monkeypatch.setattr(ScaledMatrix, "unpack", unpack)
    load(packed, shards=2)
    assert sum(unpacked) == sum(
        pair.packed[name.removesuffix("_scale_inv")].size
        for name in pair.packed
        if name.endswith("_scale_inv")
    )


def test_the_model_of_a_wrapper_is_packed_as_the_wrapper_says() -> None:
    pair = fp8_pair("mistral3-vision")
    spec = models.make_spec(pair.config | {"quantization_config": FP8})
    assert spec.scheme is not None
    assert models.make_spec(**spec.to_dict()).scheme == spec.scheme
    inner = pair.config["text_config"] | {"quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(ConfigError, match=r"quantization_config \(gptq\) is not supported"):
        models.make_spec(pair.config | {"text_config": inner})


@pytest.mark.parametrize("stored", WRAPPED)
@pytest.mark.parametrize("written", WRAPPED)
def test_settings_name_the_modules_of_a_wrapper_as_files_do_or_otherwise(
    tmp_path: Path, stored: str, written: str
) -> None:
    pair = fp8_tensor_pair("mistral3-vision", static=True)
    tensors = {name.replace("model.", stored, 1): own for name, own in pair.packed.items()}
    plain = write(tmp_path / "plain", pair.config, pair.plain)
    numbers = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    by_name = compressed(numbers, numbers | {"dynamic": False})
    by_name["config_groups"]["group_0"]["targets"] = [f"re:{written}layers"]
    layers = {f"{written}layers": {"quant_algo": "FP8"}}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    for settings in (by_name, mixed | {"quant_method": "modelopt"}):
        config = pair.config | {"quantization_config": settings}
        path = write(tmp_path / "packed", config, tensors)
        for found, expected in zip(load(path), load(plain), strict=True):
            np.testing.assert_array_equal(found, expected)


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {own: value for own, value in tensors.items() if own != name}


def having(name: str, value: np.ndarray) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: value}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{UP}_scale_inv"), f"missing {UP}_scale_inv"),
        (without(UP), f"missing {UP}; unexpected {UP}_scale_inv"),
        (
            having(f"{UP}_scale_inv", np.ones((3, 2), np.float32)),
            rf"{UP}_scale_inv has shape \[3, 2\], expected \[3, 3\]",
        ),
        (
            having(f"{UP}_scale_inv", np.ones((3, 3), np.int32)),
            f"{UP}_scale_inv has dtype I32, which is not one of F32, BF16, F16, F8_E8M0",
        ),
        (having(UP, np.ones((48, 32), np.float32)), f"unexpected {UP}_scale_inv"),
        (
            having(UP, np.ones((47, 32), ml_dtypes.float8_e4m3fn)),
            rf"{UP} has shape \[47, 32\], expected \[48, 32\]",
        ),
        (
            having(f"{UP}_scale_inv", np.full((3, 3), np.nan, np.float32)),
            f"{UP}_scale_inv has the scale nan; scales are finite and at least 0",
        ),
        (
            having("model.norm.weight", np.ones(32, ml_dtypes.float8_e4m3fn)),
            "model.norm.weight has dtype F8_E4M3, which is not one of F64, F32, F16, BF16",
        ),
    ],
)
def test_what_is_wrong_with_8_bit_blocks_is_said(
    tmp_path: Path, change: Callable[[Tensors], Tensors], message: str
) -> None:
    pair = fp8_pair(LLAMA)
    packed, _ = both(tmp_path, pair._replace(packed=change(pair.packed)), FP8)
    with pytest.raises(ConfigError, match=message):
        load(packed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{EXPERTS}_scales"), f"missing {EXPERTS}_scales"),
        (without(f"{EXPERTS}_blocks"), f"missing {EXPERTS}; unexpected {EXPERTS}_scales"),
        (
            having(f"{EXPERTS}_blocks", np.zeros((6, 32, 2, 8), np.uint8)),
            rf"{EXPERTS}_blocks has shape \[6, 32, 2, 8\], expected \[6, 32, 2, 16\]",
        ),
        (
            having(f"{EXPERTS}_blocks", np.zeros((6, 32, 2, 16), np.int8)),
            f"{EXPERTS}_blocks has dtype I8, which is not one of U8",
        ),
        (
            having(f"{EXPERTS}_scales", np.zeros((6, 32, 3), np.uint8)),
            rf"{EXPERTS}_scales has shape \[6, 32, 3\], expected \[6, 32, 2\]",
        ),
        (
            having(EXPERTS, np.zeros((6, 64, 32), np.float32)),
            f"{EXPERTS} and {EXPERTS}_blocks are both there",
        ),
        (
            having(f"{EXPERTS}_scales", np.full((6, 32, 2), 255, np.uint8)),
            f"{EXPERTS}_scales has the exponent 255",
        ),
    ],
)
def test_what_is_wrong_with_4_bit_experts_is_said(
    tmp_path: Path, change: Callable[[Tensors], Tensors], message: str
) -> None:
    pair = mxfp4_pair()
    packed, _ = both(tmp_path, pair._replace(packed=change(pair.packed)), MXFP4)
    with pytest.raises(ConfigError, match=message):
        load(packed)


@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_a_copy_in_plain_numbers_is_served_as_it_is(tmp_path: Path, method: str) -> None:
    pair, settings = fp8_pair(LLAMA), {"quant_method": method, "bits": 4, "group_size": 32}
    path = write(tmp_path / "plain", pair.config | {"quantization_config": settings}, pair.plain)
    assert weights.weight_formats(path, models.read_spec(path), None) == {}
    without = write(tmp_path / "without", pair.config, pair.plain)
    for own, other in zip(load(path), load(without), strict=True):
        np.testing.assert_array_equal(own, other)


def test_packed_tensors_need_the_configuration_that_says_so(tmp_path: Path) -> None:
    pair = fp8_pair(LLAMA)
    with pytest.raises(ConfigError, match=f"{UP} has dtype F8_E4M3, which is not one of F64"):
        load(write(tmp_path / "silent", pair.config, pair.packed))
