"""Experts whose weights stay in few bits on the devices compute what their values do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxllm import models, weights
from jaxllm.mesh import make_mesh
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.experts import DOWN, UP, ExpertMaps, Split
from jaxllm.nn.weight import int4, scaled
from jaxllm.nn.weight.experts import HeldExperts
from jaxllm.nn.weight.protocol import Shape
from jaxllm.nn.weight.schemes import rounded
from jaxllm.quantisation import WeightFormat
from jaxllm.quantisation.weight_format import ONLINE
from pallas_kernels.grouped_matmul import Groups, by_tile, group
from pallas_kernels.int4_matmul import Int4, int4_matmul
from pallas_kernels.scaled_matmul import ScaledExperts, scaled_matmul
from tests.goldens.golden import load_golden
from tests.targets import H200
from tests.weights.packed import (
    FP8,
    MXFP4,
    Pair,
    compressed,
    fp8_pair,
    integer_pair,
    mxfp4_pair,
    write,
)
from tests.weights.test_grouped import pair
from tests.weights.test_held import INTEGERS, held, logits
from tests.weights.test_rounding import ROUNDED, online

EXPERTS = "qwen3-moe-normalised"


@pytest.mark.parametrize(
    ("numbers", "inner", "shards", "takes"),
    [
        ("fp8", 768, 1, True),
        ("fp8", 704, 1, False),  # of which a last tile of inputs would be half a tile
        ("fp8", 1408, 2, False),
        ("int4", 768, 1, True),
        ("int4", 768, 2, False),
    ],
)
def test_a_kernel_takes_all_experts_at_once_by_the_sizes_on_a_device(
    numbers: str, inner: int, shards: int, takes: bool
) -> None:
    init, split = Init(nnx.Rngs(0), jnp.float32), Split(1, shards)
    up = ExpertMaps(init, (1, 2 * inner, 256), UP, parts=2, split=split)
    down = ExpertMaps(init, (1, 256, inner), DOWN, split=split)
    for maps in (up, down):
        maps.hold(ONLINE[numbers])
    assert all(maps.weight.stacked.takes_all(H200) for maps in (up, down)) == takes


def check(tmp_path: Path, made: Pair, settings: dict, expected: WeightFormat) -> None:
    path, spec = held(tmp_path, made, settings)
    experts = {name: kind for name, kind in spec.formats.items() if ".experts" in name}
    assert len(experts) > 2 and expected in experts.values()
    plain = write(tmp_path / "plain", made.config, made.plain)
    found = logits(path, spec)
    np.testing.assert_allclose(found, logits(plain, models.read_spec(plain)), atol=2e-5)


@pytest.mark.slow
def test_4_bit_floats_of_gpt_oss(tmp_path: Path) -> None:
    check(tmp_path, mxfp4_pair(), MXFP4, WeightFormat("fp4", 32))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        pytest.param("awq", WeightFormat("int4", 16, form="zeros"), marks=pytest.mark.slow),
        pytest.param(
            "pack-quantized", WeightFormat("int4", 8, form="zeros"), marks=pytest.mark.slow
        ),
        pytest.param("gptq", WeightFormat("int4", 8, form="zeros"), marks=pytest.mark.slow),
        pytest.param("pack-quantized symmetric", WeightFormat("int4"), marks=pytest.mark.slow),
    ],
)
def test_integers_of_4_bits(tmp_path: Path, kind: str, expected: WeightFormat) -> None:
    made, settings = pair(EXPERTS, kind)
    check(tmp_path, made, settings, expected)


@pytest.mark.slow
def test_integers_of_8_bits(tmp_path: Path) -> None:
    made = integer_pair(EXPERTS, 8)
    settings = compressed(INTEGERS | {"strategy": "group", "group_size": 8})
    check(tmp_path, made, settings, WeightFormat("int8", 8))


@pytest.mark.slow
def test_inputs_of_experts_have_zero_points(tmp_path: Path) -> None:
    inputs = INTEGERS | {"strategy": "token", "dynamic": True, "symmetric": False}
    path, spec = held(tmp_path, integer_pair(EXPERTS), compressed(INTEGERS, inputs))
    assert any(".experts." in name for name in spec.formats)
    assert set(spec.formats.values()) == {WeightFormat("int8", None, "shifted")}
    plain = replace(spec, formats={})
    assert 0 < np.abs(logits(path, spec) - logits(path, plain)).max() < 0.2


@pytest.mark.slow
def test_8_bit_floats_in_blocks_with_inputs_rounded_alike(tmp_path: Path) -> None:
    path, spec = held(tmp_path, fp8_pair("minimax-m2-rotary-dim"), FP8)
    expert = spec.formats["model.layers.0.block_sparse_moe.experts.3.w1"]
    assert expert == WeightFormat("fp8", 12, "group")
    plain = replace(spec, formats={})
    assert 0 < np.abs(logits(path, spec) - logits(path, plain)).max() < 0.2


@pytest.mark.parametrize(
    ("case", "wish"),
    [
        pytest.param("mixtral-experts", "int8_w8a16", marks=pytest.mark.slow),
        pytest.param("gpt-oss-fused", "fp8_w8a16", marks=pytest.mark.slow),
        pytest.param("olmoe-clip", "int8_w8a16", marks=pytest.mark.slow),
    ],
)
def test_plain_experts_are_rounded_while_they_load(tmp_path: Path, case: str, wish: str) -> None:
    path = load_golden(case).directory
    spec = online(path, wish)
    tensors = load_file(path / "model.safetensors")
    names = {own for name in spec.formats for own in (name, f"{name}.weight")}
    for name in names & set(tensors):
        turned = tensors[name].ndim == 3  # [E, in, out]
        rows = tensors[name].swapaxes(1, 2) if turned else tensors[name]
        made = ROUNDED[wish](rows.reshape(-1, rows.shape[-1])).reshape(rows.shape)
        tensors[name] = np.ascontiguousarray(made.swapaxes(1, 2) if turned else made)
    plain = write(tmp_path / "plain", dict(spec.config), tensors)
    np.testing.assert_allclose(
        logits(path, spec), logits(plain, models.read_spec(plain)), atol=3e-5
    )


def test_experts_that_lie_below_each_other_are_rounded_one_by_one(tmp_path: Path) -> None:
    path, made = load_golden("dbrx-clip").directory, ROUNDED["int8_w8a16"]
    spec = online(path, "int8_w8a16")
    tensors = load_file(path / "model.safetensors")
    held_names = {own for name in spec.formats for own in (name, f"{name}.weight")}
    for name in held_names & set(tensors):
        if name.endswith(".w2"):  # [E, in, out]
            rows = tensors[name].reshape(6, 16, 32).swapaxes(1, 2)
            turned = made(rows.reshape(-1, 16)).reshape(rows.shape).swapaxes(1, 2)
            tensors[name] = np.ascontiguousarray(turned).reshape(-1, 32)
        else:
            tensors[name] = made(tensors[name])
    plain = write(tmp_path / "plain", models.read_config(path), tensors)
    np.testing.assert_allclose(
        logits(path, spec), logits(plain, models.read_spec(plain)), atol=3e-5
    )


def test_4_bit_experts_take_a_quarter_of_the_bytes() -> None:
    shape = Shape((4, 128), (256,), ("expert", None, "embed"), dtype=jnp.bfloat16)
    state = jax.tree.leaves(HeldExperts(WeightFormat("fp4", 32), shape))
    assert sum(leaf.nbytes for leaf in state) == 4 * 128 * 256 * (4 + 16 / 32) / 8


@pytest.mark.slow
def test_random_experts_have_the_format_of_the_checkpoint(tmp_path: Path) -> None:
    path, packed = held(tmp_path, mxfp4_pair(), MXFP4)
    (path / "model.safetensors").unlink()
    spec = replace(packed, formats=weights.weight_formats(path, packed, None, "dummy"))
    assert spec.formats == packed.formats
    _, state = weights.load(path, weights.outline(spec, make_mesh(1), jnp.float32), "dummy")
    shapes = weights.outline(spec, make_mesh(1), jnp.float32).state
    found, expected = (
        [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(each)] for each in (state, shapes)
    )
    assert found == expected


def one_int4(x: jax.Array, w: Int4) -> jax.Array:
    return int4_matmul(x, w, backend="reference")


def one_scaled(x: jax.Array, w: ScaledExperts) -> jax.Array:
    form: Any = {"group": w.group, "inputs": w.inputs, "input_scale": w.input_scale}
    return scaled_matmul(x, w.values, w.scale, **form, backend="reference")


@pytest.mark.parametrize(
    ("kind", "scheme", "one"),
    [
        (WeightFormat("fp4", 32, rounded=True), int4, one_int4),
        (WeightFormat("fp8", inputs="token", rounded=True), scaled, one_scaled),
        (WeightFormat("int8", inputs="given", rounded=True), scaled, one_scaled),
        (WeightFormat("int8", 32, rounded=True), scaled, one_scaled),
    ],
    ids=("fp4", "fp8", "int8", "int8 alone"),
)
def test_the_kernel_of_all_experts_gives_what_tiles_one_by_one_do(
    monkeypatch: pytest.MonkeyPatch, kind: WeightFormat, scheme: ModuleType, one: Any
) -> None:
    """With the product of the kernel from plain JAX: bias, gate and rows are as they should be."""
    rng, shape = np.random.default_rng(0), (4, 128, 128)
    held = HeldExperts(kind, Shape((4, 128), (128,), ("expert", None, "embed"), dtype=jnp.bfloat16))
    plain = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    for name, value in jax.vmap(lambda w: rounded(kind, w))(plain).items():
        if getattr(held.stacked, name, None) is not None:
            setattr(held.stacked, name, nnx.Param(value))
    bias = jnp.asarray(rng.normal(size=(4, 128)), jnp.bfloat16)
    x = jnp.asarray(rng.normal(size=(5, 128)), jnp.bfloat16)
    expert = rng.permuted(np.tile(np.arange(4), (5, 1)), axis=1)[:, :2]
    groups = group(jnp.asarray(expert), 4)
    gating = lambda gate, up: jax.nn.silu(gate) * up
    expected = held.grouped(x, groups, DenseContext(), bias, gating)

    def kernel(
        x_PI: jax.Array, w: Any, own: Groups, bias_EO: jax.Array, gating: Any, backend: str
    ) -> jax.Array:
        each = lambda x_RI, e: one(x_RI, jax.tree.map(lambda a: a[e], w))
        return by_tile(each, x_PI, own, bias_EO, gating)

    calls = Mock(side_effect=kernel)
    monkeypatch.setattr(scheme, "_grouped", calls)
    monkeypatch.setattr(DenseContext, "target", H200)
    found = held.grouped(x, groups, DenseContext(), bias, gating)
    calls.assert_called_once()
    rows = np.asarray(groups.place_TK).reshape(-1)
    wanted, got = (np.asarray(y, np.float32)[rows] for y in (expected, found))
    np.testing.assert_allclose(got, wanted, atol=0.1, rtol=0.02)
    assert np.abs(wanted).max() > 1
