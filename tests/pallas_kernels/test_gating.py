"""Gatings as kernels compute them: exact where XLA's are, and every one that needs no erf."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.nn.mlp import ACTIVATIONS
from pallas_kernels.gated_matmul import GELU, SILU, Gated, computes, mosaic_gpu
from pallas_kernels.gated_matmul.cases import ACTIVATIONS as ORACLES
from pallas_kernels.gated_matmul.gating import in_kernels
from pallas_kernels.gated_matmul.plan import K, Tuning
from pallas_kernels.grouped_matmul import group
from pallas_kernels.grouped_matmul import mosaic_gpu as grouped
from pallas_kernels.int4_matmul import cases as int4_cases
from pallas_kernels.int4_matmul.mosaic_grouped import grouped_int4_matmul
from pallas_kernels.scaled_matmul.experts import ScaledExperts
from pallas_kernels.scaled_matmul.mosaic_grouped import grouped_scaled_matmul
from tests.pallas_kernels.places import jitted, launch_options, pick, places

gatings = pytest.mark.parametrize("gating", [SILU, GELU], ids=["silu", "gelu"])


@gatings
def test_kernels_compute_a_gating_as_exactly_as_xla(gating: Gated) -> None:
    gate = np.linspace(-12, 12, 4801).astype(np.float32)
    up = np.full_like(gate, 1.5)
    wanted = ORACLES[gating](gate.astype(np.float64)) * 1.5
    found = np.asarray(jax.jit(in_kernels(gating))(gate, up), np.float64)
    assert (np.abs(found - wanted) <= 1e-5 * np.abs(wanted) + 1e-14).all()
    xla = np.asarray(jax.jit(gating)(gate, up), np.float64)
    np.testing.assert_allclose(found, xla, rtol=1e-5, atol=2e-6)


@gatings
def test_gates_of_any_size_give_numbers(gating: Gated) -> None:
    gate = np.array([-1e30, -1e4, -90, -0.0, 0, 90, 1e4, 1e30], np.float32)
    found = np.asarray(jax.jit(in_kernels(gating))(gate, np.ones_like(gate)))
    np.testing.assert_array_equal(found[[0, 1, 3, 4]], 0)
    np.testing.assert_allclose(found[5:], gate[5:], rtol=1e-6)
    assert -1e-30 <= found[2] <= 0


def test_a_gating_without_a_sigmoid_is_computed_as_it_is() -> None:
    relu = Gated(jax.nn.relu)
    assert in_kernels(relu) is relu
    plain = lambda gate, up: gate + up
    assert in_kernels(plain) is plain


def test_equal_gatings_are_one_key_of_a_compiled_kernel() -> None:
    assert Gated(ACTIVATIONS["silu"]) == SILU and hash(Gated(jax.nn.silu)) == hash(SILU)
    assert Gated(ACTIVATIONS["gelu_pytorch_tanh"]) == GELU != SILU


@places
@gatings
def test_a_kernels_gating_is_right_to_the_rounding_of_its_outputs(
    place: str, gating: Gated
) -> None:
    """Rows of x that are one at one place alone make gates and ups that are weights."""
    x = jnp.eye(K, dtype=jnp.bfloat16)
    width = pick(place, 8, 512)
    gate = np.linspace(-9, 9, K * width).reshape(width, K)
    w = jnp.asarray(np.concatenate([gate, np.ones_like(gate)]), jnp.bfloat16)
    run = jitted(mosaic_gpu.gated_matmul)
    tuning = pick(place, Tuning(64, 16, 2, 1), None)
    found = np.asarray(run(x, w, gating=gating, tuning=tuning, **launch_options(place)), np.float64)
    wanted = ORACLES[gating](np.asarray(w[:width], np.float64).T)
    assert (np.abs(found - wanted) <= 2**-7.9 * np.abs(wanted) + 1e-14).all()


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_the_kernel_lowers_with_every_activation_that_it_is_asked_for(name: str) -> None:
    gating = Gated(ACTIVATIONS[name])
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 128), (96, 128)))
    if computes(gating):
        traced = jitted(mosaic_gpu.gated_matmul).trace(x, w, gating=gating)
        assert "mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()
    else:
        with pytest.raises(ValueError, match="takes gatings without erf; approximate gelu"):
            mosaic_gpu.check(x, w, gating)


@gatings
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_kernels_of_experts_compute_a_gating_as_others_do(gating: Gated, bits: int) -> None:
    x, groups = jnp.ones((4, 256), jnp.bfloat16), group(jnp.zeros((4, 1), jnp.int32), 2)
    if bits == 16:
        w = jnp.ones((2, 256, 256), jnp.bfloat16)
        made = jax.make_jaxpr(lambda x: grouped.grouped_matmul(x, w, groups, None, gating))(x)
    elif bits == 8:
        values, scale = jnp.ones((2, 256, 256), jnp.float8_e4m3fn), jnp.ones((2, 256, 1))
        held = ScaledExperts(values, scale, 256, "token", None)
        made = jax.make_jaxpr(lambda x: grouped_scaled_matmul(x, held, groups, None, gating))(x)
    else:
        case = int4_cases.Case(name="", tokens=4, outputs=256, inputs=256, group=64)
        one = int4_cases.packed(case, int4_cases.inputs(case)[1], "bfloat16")
        four = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), one)
        made = jax.make_jaxpr(lambda x: grouped_int4_matmul(x, four, groups, None, gating))(x)
    assert "rsqrt" in str(made) and not {"tanh", "logistic"} & set(re.findall(r"\w+", str(made)))
