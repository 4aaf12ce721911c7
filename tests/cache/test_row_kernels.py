"""The kernels of a step that work token by token: lowered once, or left to XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.cache import row_kernels
from jaxllm.cache.kv import (
    KVCache,
    PagedContext,
)
from jaxllm.nn.linear import Init
from jaxllm.nn.mlp import GatedMLP
from pallas_kernels.gated_matmul import GELU, SILU, Gated
from tests.cache.test_kv import TABLE, batch, tokens


def sums_lowered_for_cuda(backend, rows):
    """Two sums and norms, one after the other, of a step."""

    def run(inputs, x, weight):
        context = PagedContext(KVCache((), ()), [inputs], backend)
        return context.add_norm(*context.add_norm(x, x, weight, 1e-6), weight, 1e-6)

    x = jax.ShapeDtypeStruct((rows, 256), jnp.bfloat16)
    return (
        jax.jit(run)
        .trace(batch((), (), TABLE), x, jax.ShapeDtypeStruct((256,), jnp.bfloat16))
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


def test_the_kernel_for_sums_and_norms_is_lowered_once_for_all_layers():
    assert sums_lowered_for_cuda("mosaic_gpu", 3).count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(("backend", "rows"), [("xla", 3), ("mosaic_gpu", 300)])
def test_sums_and_norms_are_left_to_xla_where_there_is_no_kernel_for_them(backend, rows):
    assert "mosaic_gpu_v2" not in sums_lowered_for_cuda(backend, rows)


def products_lowered_for_cuda(backend, rows, gating=SILU):
    """The gated products of two layers of a step."""

    def run(inputs, x, weights):
        context = PagedContext(KVCache((), ()), [inputs], backend)
        return [context.gated_product(x, weight, gating) for weight in weights]

    x, weight = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 2048), (1, 2, 8192, 2048))
    )
    return (
        jax.jit(run)
        .trace(batch((), (), TABLE), x, [weight, weight])
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


@pytest.mark.parametrize("gating", [SILU, GELU], ids=["silu", "gelu"])
def test_the_kernel_for_gated_products_is_lowered_once_for_all_layers(gating):
    assert products_lowered_for_cuda("mosaic_gpu", 64, gating).count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(("backend", "rows"), [("xla", 64), ("reference", 64), ("mosaic_gpu", 32)])
def test_gated_products_are_left_to_xla_where_there_is_no_faster_kernel(backend, rows):
    assert "mosaic_gpu_v2" not in products_lowered_for_cuda(backend, rows)


def test_gated_products_with_erf_are_left_to_xla():
    exact = Gated(functools.partial(jax.nn.gelu, approximate=False))
    assert "mosaic_gpu_v2" not in products_lowered_for_cuda("mosaic_gpu", 64, exact)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_the_gated_product_is_what_the_mlp_computes_without_it(activation, monkeypatch):
    mlp = GatedMLP(Init(nnx.Rngs(0), jnp.float32), 8, 12, 1, activation)
    mlp.gate_up.weight[...] *= 50  # so that activations are far from linear
    x, context = (
        jnp.asarray(tokens(5)[0][:, 0, :8]),
        PagedContext(KVCache((), ()), [], "reference"),
    )
    wanted = mlp(x, context)
    monkeypatch.setattr(row_kernels.gated_matmul, "backend_for", lambda *given: "reference")
    assert context.gated_product(x, mlp.gate_up.weight[...], mlp.gating).shape == (5, 12)
    np.testing.assert_allclose(mlp(x, context), wanted, rtol=1e-5, atol=1e-6)
