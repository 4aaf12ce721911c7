"""Matrices whose checkpoint has a scale of inputs for each: parts of a fused map, which read the
same inputs, round them as each of their own scales says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import models, weights
from jaxllm.mesh import make_mesh
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.weight.experts import HeldExperts
from jaxllm.nn.weight.protocol import Shape
from jaxllm.quantisation import WeightFormat
from pallas_kernels.grouped_matmul import group
from tests.weights.packed import FP8_STATIC, Tensors, fp8_tensor_pair, write
from tests.weights.test_held import nearest

GIVEN = WeightFormat("fp8", None, "given")
OWN = {"q_proj": 0.01, "k_proj": 0.002, "v_proj": 0.01, "gate_proj": 0.003, "up_proj": 0.003}


def checkpoint(tmp_path: Path) -> tuple[Path, models.ModelSpec, Tensors, Tensors]:
    """One with the input scales of OWN, its spec with formats, and its tensors, as they are packed
    and plain."""
    made = fp8_tensor_pair("llama-gqa", static=True)
    for name in made.packed:
        if name.endswith(".input_scale"):
            made.packed[name] = np.array([OWN.get(name.split(".")[-2], 0.02)], np.float32)
    path = write(tmp_path, made.config | {"quantization_config": FP8_STATIC}, made.packed)
    spec = models.read_spec(path)
    spec = replace(spec, formats=weights.weight_formats(path, spec, None))
    return path, spec, made.packed, made.plain


def test_parts_whose_inputs_have_unlike_scales_stay_apart(tmp_path: Path) -> None:
    path, spec, packed, plain = checkpoint(tmp_path)
    owner = "model.layers.0.self_attn"
    names = [f"{owner}.{part}_proj" for part in "qkv"]
    assert [spec.formats[name].input_scale for name in names] == [
        packed[f"{name}.input_scale"].item() for name in names
    ]
    others = {kind for name, kind in spec.formats.items() if ".self_attn." not in name}
    assert others == {GIVEN}  # gates and ups are alike, and share one product

    model = nnx.merge(*weights.load(path, weights.outline(spec, make_mesh(1), jnp.float32)))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, spec.width)), jnp.float32)
    found = model.layers[0].attention.qkv.product(x, DenseContext()).reshape(5, -1)
    wanted = [
        nearest(x, jnp.full((1, 1), packed[f"{name}.input_scale"].item()))
        @ plain[f"{name}.weight"].T
        for name in names
    ]
    np.testing.assert_allclose(found, np.concatenate(wanted, axis=1), atol=1e-5)


def test_gates_and_ups_of_experts_round_inputs_by_scales_of_their_own() -> None:
    rng, experts, rows, columns = np.random.default_rng(0), 3, 8, 16
    shape = Shape((experts, 2 * rows), (columns,), ("expert", None, "embed"), tensors=2)
    held = HeldExperts(GIVEN, shape)
    values = jnp.asarray(rng.normal(size=(experts, 2 * rows, columns)), jnp.float8_e4m3fn)
    scales = rng.uniform(0.001, 0.01, (experts, 2, 1)).astype(np.float32)
    held.stacked.values = nnx.Param(values)
    held.stacked.scale = nnx.Param(jnp.ones((experts, 2 * rows, 1)))
    held.stacked.input_scale = nnx.Param(jnp.asarray(scales))
    x = jnp.asarray(rng.normal(size=(4, columns)), jnp.float32)
    expert = rng.integers(0, experts, (4, 1))
    groups = group(jnp.asarray(expert), experts)
    y = held.grouped(x, groups, DenseContext(), None, None)
    found = np.asarray(y)[np.asarray(groups.place_TK)[:, 0]]
    for row, own in enumerate(expert[:, 0]):
        parts = values[own].astype(jnp.float32).reshape(2, rows, columns)
        wanted = [
            nearest(x[row : row + 1], scales[own, part].reshape(1, 1)) @ parts[part].T
            for part in range(2)
        ]
        assert found[row] == pytest.approx(np.concatenate(wanted, axis=1)[0], abs=1e-5)
