"""The kernels of a step that work token by token: lowered once, or left to XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.cache import row_kernels
from jaxllm.cache.collective import AllReduce
from jaxllm.cache.kv import PagedContext
from jaxllm.nn.linear import Init, Linear
from jaxllm.nn.mlp import GatedMLP
from jaxllm.nn.weight.dense import Dense
from jaxllm.nn.weight.parameters import contract
from pallas_kernels.all_reduce import Group
from pallas_kernels.gated_matmul import GELU, SILU, Gated
from pallas_kernels.parts import Parts, whole
from tests.cache.test_kv import TABLE, batch, tokens
from tests.targets import H200, TARGETS


def sums_lowered_for_cuda(backend, rows):
    """Two sums and norms, one after the other, of a step."""

    def run(inputs, x, weight):
        context = PagedContext((), (), [inputs], backend, target=TARGETS[backend])
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


def products_lowered_for_cuda(backend, rows, product):
    """The products of two layers of a step, each `product(context, x, weight)`."""

    def run(inputs, x, weights):
        context = PagedContext((), (), [inputs], backend, target=TARGETS[backend])
        return [product(context, x, weight) for weight in weights]

    x, weight = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 2048), (1, 2, 8192, 2048))
    )
    return (
        jax.jit(run)
        .trace(batch((), (), TABLE), x, [weight, weight])
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


def gated(gating=SILU):
    return lambda context, x, weight: context.gated_product(x, weight, gating)


@pytest.mark.parametrize("gating", [SILU, GELU], ids=["silu", "gelu"])
def test_the_kernel_for_gated_products_is_lowered_once_for_all_layers(gating):
    assert products_lowered_for_cuda("mosaic_gpu", 64, gated(gating)).count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(("backend", "rows"), [("xla", 64), ("reference", 64), ("mosaic_gpu", 32)])
def test_gated_products_are_left_to_xla_where_there_is_no_faster_kernel(backend, rows):
    assert "mosaic_gpu_v2" not in products_lowered_for_cuda(backend, rows, gated())


def test_gated_products_with_erf_are_left_to_xla():
    exact = Gated(functools.partial(jax.nn.gelu, approximate=False))
    assert "mosaic_gpu_v2" not in products_lowered_for_cuda("mosaic_gpu", 64, gated(exact))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_the_gated_product_is_what_the_mlp_computes_without_it(activation, monkeypatch):
    mlp = GatedMLP(Init(nnx.Rngs(0), jnp.float32), 8, 12, 1, activation)
    mlp.gate_up.weight[...] *= 50  # so that activations are far from linear
    x, context = (
        jnp.asarray(tokens(5)[0][:, 0, :8]),
        PagedContext((), (), [], "reference"),
    )
    wanted = mlp(x, context)
    monkeypatch.setattr(row_kernels.gated_matmul, "find", lambda *given: "reference")
    assert context.gated_product(x, mlp.gate_up.weight[...], mlp.gating).shape == (5, 12)
    np.testing.assert_allclose(mlp(x, context), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "rows", "kernels"),
    [("mosaic_gpu", 544, 1), ("mosaic_gpu", 64, 0), ("xla", 544, 0), ("reference", 544, 0)],
)
def test_the_kernel_for_products_is_lowered_once_for_all_layers_where_it_is_faster(
    backend, rows, kernels
):
    def both(context, x, weight):
        dense = Dense(weight)
        return dense.product(x, 1, context), whole(dense.part(x, 1, context))

    assert products_lowered_for_cuda(backend, rows, both).count("mosaic_gpu_v2") == kernels


def test_products_that_several_devices_add_up_are_xlas():
    x, weight = (jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16) for rows in (256, 4096))
    assert row_kernels.matmul.find(H200, x, weight) == "mosaic_gpu"
    two = row_kernels.RowKernels(H200, AllReduce(Group("width", 2)))
    assert two.product(x, weight, 1) is None


@pytest.mark.parametrize("shares", [1, 2])
def test_a_product_has_the_axes_of_its_weight_whole_or_in_parts(shares, monkeypatch):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((5, 2, 4)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((3, 6, 2, 4)), jnp.float32)

    def product(x_TI, w_OI, backend):
        halves = (jnp.split(each, shares, axis=1) for each in (x_TI, w_OI))
        sums = jnp.stack([a @ b.T for a, b in zip(*halves, strict=True)])
        return sums[0] if shares == 1 else Parts(sums, (), (5, 18), jnp.float32)

    monkeypatch.setattr(row_kernels.matmul, "find", lambda *given: "reference")
    monkeypatch.setattr(row_kernels, "_matmul", product)
    context = PagedContext((), (), [], "reference")
    for dense in (contract(x, weight, 2), whole(context.product(x, weight, 2))):
        np.testing.assert_allclose(dense, jnp.einsum("tij,abij->tab", x, weight), rtol=1e-5)
    map = Linear(Init(nnx.Rngs(0), jnp.float32), (3, 6), (2, 4), (None,) * 4)
    map.weight[...] = weight
    found = map.product_part(x, context)
    assert isinstance(found, Parts) == (shares == 2) and found.shape == (5, 3, 6)
    np.testing.assert_allclose(map(x, context), whole(found), rtol=1e-6)
