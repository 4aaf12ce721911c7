"""Packed weights that stay packed on the devices compute what their values do, with inputs rounded
alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import models, weights
from jaxllm.mesh import make_mesh
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.weight.dense import Dense
from jaxllm.nn.weight.parameters import contract
from jaxllm.nn.weight.schemes import backend
from jaxllm.quantisation import WeightFormat
from pallas_kernels.scaled_matmul.rounding import rounded_by
from tests.targets import A100, H200
from tests.weights.packed import (
    BLOCK,
    FBGEMM,
    FP8,
    FP8_STATIC,
    FP8_TENSOR,
    INPUT_SCALE,
    Pair,
    compressed,
    exponent_pair,
    fp8_pair,
    fp8_row_pair,
    fp8_tensor_pair,
    integer_pair,
    write,
)

TOKENS = 12


def logits(path: Path, spec: models.ModelSpec, shards: int = 1) -> np.ndarray:
    weights.check_shapes(path, spec)
    graphdef, state = weights.load(path, weights.outline(spec, make_mesh(shards), jnp.float32))
    model, token_T = nnx.merge(graphdef, state), jnp.arange(TOKENS) % spec.vocab_size
    context = DenseContext()
    return np.asarray(model.logits(model(token_T, token_T, context), context))


def held(tmp_path: Path, pair: Pair, settings: dict[str, Any]) -> tuple[Path, models.ModelSpec]:
    path = write(tmp_path / "packed", pair.config | {"quantization_config": settings}, pair.packed)
    spec = models.read_spec(path)
    return path, replace(spec, formats=weights.weight_formats(path, spec, None))


def nearest(x: jax.Array, scale: jax.Array, dtype: Any = jnp.float8_e4m3fn) -> jax.Array:
    """x as its numbers of 8 bits times the scale stand for it."""
    return rounded_by(x, scale, dtype).astype(jnp.float32) * scale


def integers(x: jax.Array) -> jax.Array:
    scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True) * (1 / 127)
    return nearest(x, scale, jnp.int8)


def shifted(x: jax.Array) -> jax.Array:
    """The inputs as integers of 256 steps between each token's smallest and largest number."""
    low, high = (f(x, axis=-1, keepdims=True, initial=0) for f in (jnp.min, jnp.max))
    scale = (high - low) * (1 / 255)
    zero = jnp.round(-128 - low / scale)
    return (jnp.clip(jnp.round(x / scale + zero), -128, 127) - zero) * scale


def with_scales(x: jax.Array, columns: int) -> jax.Array:
    """The inputs of a product as 8-bit floats with a scale for each token and so many columns."""
    parts = jnp.split(x, [*range(columns, x.shape[-1], columns)], axis=-1)
    scales = (jnp.max(jnp.abs(part), axis=-1, keepdims=True) * (1 / 448) for part in parts)
    return jnp.concatenate([nearest(*both) for both in zip(parts, scales, strict=True)], axis=-1)


INTEGERS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
BOUND = FBGEMM["activation_scale_ub"]
BLOCKED = lambda x: with_scales(x, BLOCK[1])
KINDS = {
    "blocks": (fp8_pair, FP8, BLOCKED, WeightFormat("fp8", BLOCK[1], "group")),
    "matrix": (
        fp8_tensor_pair,
        FP8_TENSOR,
        lambda x: with_scales(x, x.shape[-1]),
        WeightFormat("fp8", None, "token"),
    ),
    "bounded": (
        fp8_row_pair,
        FBGEMM,
        lambda x: with_scales(jnp.clip(x, -BOUND, BOUND), x.shape[-1]),
        WeightFormat("fp8", None, "token", bound=BOUND),
    ),
    "static": (
        lambda case: fp8_tensor_pair(case, static=True),
        FP8_STATIC,
        lambda x: nearest(x, jnp.full((1, 1), INPUT_SCALE)),
        WeightFormat("fp8", None, "given"),
    ),
    "modelopt": (
        lambda case: fp8_tensor_pair(case, static=True),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        lambda x: nearest(x, jnp.full((1, 1), INPUT_SCALE)),
        WeightFormat("fp8", None, "given"),
    ),
    "exponents": (
        exponent_pair,
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        lambda x: x,
        WeightFormat("fp8", 32, "plain"),
    ),
    "integers": (
        integer_pair,
        compressed(INTEGERS, INTEGERS | {"strategy": "token", "dynamic": True}),
        integers,
        WeightFormat("int8", None, "token"),
    ),
    "integers with zero points": (
        integer_pair,
        compressed(INTEGERS, INTEGERS | {"strategy": "token", "dynamic": True, "symmetric": False}),
        shifted,
        WeightFormat("int8", None, "shifted"),
    ),
    "groups of integers": (
        lambda case: integer_pair(case, 8),
        compressed(INTEGERS | {"strategy": "group", "group_size": 8}),
        lambda x: x,
        WeightFormat("int8", 8, "plain"),
    ),
}


@pytest.mark.parametrize(
    ("kind", "case", "shards"),
    [
        ("blocks", "llama-gqa", 1),
        ("groups of integers", "llama-gqa", 2),
        ("bounded", "llama-gqa", 1),
        ("exponents", "llama-gqa", 2),
        ("integers with zero points", "llama-gqa", 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("blocks", "llama-gqa", 2),
                ("matrix", "llama-gqa", 1),
                ("exponents", "llama-mqa-tied-linear", 1),
                ("static", "llama-gqa", 1),
                ("integers", "llama-gqa", 1),
                ("modelopt", "llama-gqa", 1),
                ("integers", "llama-mqa-tied-linear", 1),
                ("integers with zero points", "glm-biases", 1),
                ("groups of integers", "glm-biases", 1),
                ("static", "llama-gqa", 2),
                ("bounded", "glm-biases", 2),
                ("blocks", "glm-biases", 1),
                ("matrix", "glm-biases", 2),
                ("blocks", "llama-mqa-tied-linear", 2),
            )
        ),
    ],
)
def test_8_bit_floats_compute_what_their_values_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, case: str, shards: int
) -> None:
    make, settings, rounding, expected = KINDS[kind]
    path, spec = held(tmp_path, pair := make(case), settings)
    layers = {name for name in pair.packed if ".layers." in name and name.endswith("_proj.weight")}
    assert set(spec.formats.values()) == {expected}
    assert {f"{name}.weight" for name in spec.formats} == layers
    found = logits(path, spec, shards)

    def product(self: Dense, x: jax.Array, dims: int, context: RowContext) -> jax.Array:
        flat = x.reshape(*x.shape[: x.ndim - dims], -1)
        return contract(rounding(flat).reshape(x.shape), self[...], dims)

    monkeypatch.setattr(Dense, "product", product)
    monkeypatch.setattr(Dense, "part", product)
    plain = write(tmp_path / "plain", pair.config, pair.plain)
    np.testing.assert_allclose(found, logits(plain, models.read_spec(plain)), atol=1e-4)


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in ("blocks", "integers")), "static"],
)
def test_random_weights_have_the_format_of_the_checkpoint(tmp_path: Path, kind: str) -> None:
    make, settings, _, expected = KINDS[kind]
    path, packed = held(tmp_path, make("llama-gqa"), settings)
    (path / "model.safetensors").unlink()
    spec = replace(packed, formats=weights.weight_formats(path, packed, None, "dummy"))
    assert spec.formats == packed.formats
    assert set(spec.formats.values()) == {expected}
    shapes = weights.outline(spec, make_mesh(1), jnp.float32).state
    _, state = weights.load(path, weights.outline(spec, make_mesh(1), jnp.float32), "dummy")
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == [
        leaf.dtype for leaf in jax.tree.leaves(shapes)
    ]


@pytest.mark.parametrize(("kind", "count"), [("static", 14), ("groups of integers", 0)])
def test_maps_of_few_outputs_stay_packed_where_their_inputs_are_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, count: int
) -> None:
    monkeypatch.setattr("jaxllm.weights.formats.LEAST_ROWS", 10**9)
    make, settings, _, _ = KINDS[kind]
    _, spec = held(tmp_path, make("llama-gqa"), settings)
    assert len(spec.formats) == count


def test_a_part_that_is_not_packed_is_plain_beside_the_others(tmp_path: Path) -> None:
    pair = fp8_pair("llama-gqa")
    key = "model.layers.1.self_attn.k_proj.weight"
    packed = pair.packed | {key: pair.plain[key]}
    del packed[f"{key}_scale_inv"]
    path, spec = held(tmp_path, pair._replace(packed=packed), FP8)
    every = {name.removesuffix(".weight") for name in packed if name.endswith("_proj.weight")}
    assert set(spec.formats) == every - {key.removesuffix(".weight")}
    assert np.isfinite(logits(path, spec)).all()


def test_modules_that_were_left_out_are_plain_beside_rows_of_8_bit_floats(tmp_path: Path) -> None:
    left_out = tuple(FBGEMM["modules_to_not_convert"])
    path, spec = held(tmp_path, pair := fp8_row_pair("llama-gqa", left_out), FBGEMM)
    packed = {name.removesuffix("_scale") for name in pair.packed if name.endswith("weight_scale")}
    assert packed and {f"{name}.weight" for name in spec.formats} == packed
    assert not any(name.startswith(left_out) for name in spec.formats)
    assert np.isfinite(logits(path, spec)).all()


def test_a_bound_of_inputs_is_the_settings(tmp_path: Path) -> None:
    pair = fp8_row_pair("llama-gqa")
    found = {}
    for bound in (0.02, BOUND, 1200, None):
        settings = FBGEMM | {"activation_scale_ub": bound}
        if bound is None:
            del settings["activation_scale_ub"]
        found[bound] = logits(*held(tmp_path, pair, settings))
    np.testing.assert_array_equal(found[1200], found[None])
    assert np.abs(found[BOUND] - found[None]).max() > 1e-3
    assert np.abs(found[BOUND] - found[0.02]).max() > 1e-3


def test_names_of_scales_may_be_those_of_blocks(tmp_path: Path) -> None:
    given = fp8_tensor_pair("llama-gqa", suffix="weight_scale_inv")
    path, spec = held(tmp_path, given, FP8_TENSOR)
    other, own = held(tmp_path, fp8_tensor_pair("llama-gqa"), FP8_TENSOR)
    assert spec.formats == own.formats
    np.testing.assert_array_equal(logits(path, spec), logits(other, own))


@pytest.mark.parametrize(
    ("kind", "taken"),
    [
        (WeightFormat("fp8", None, "token"), True),
        (WeightFormat("fp8", 128, "group"), True),
        (WeightFormat("int8", None, "given"), True),
        (WeightFormat("fp8", None, "plain"), True),
        (WeightFormat("int8", 32, "plain"), True),
        (WeightFormat("int8", 96, "plain"), False),
        (WeightFormat("int8", 32, "token"), False),
        (WeightFormat("nf4", 64), True),
    ],
    ids=lambda each: each.title if isinstance(each, WeightFormat) else f"{each}",
)
def test_a_start_names_the_kernel_where_it_takes_the_format(
    kind: WeightFormat, taken: bool
) -> None:
    assert backend(kind, H200) == ("mosaic_gpu" if taken else "reference")
    assert backend(kind, A100) == "reference"
