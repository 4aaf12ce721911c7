"""A norm rounds its result where the one map that reads it wants that, and adds up products that
are in parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.cache.collective import ALONE
from jaxllm.nn import blocks
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.linear import Init, Linear
from jaxllm.nn.mlp import MLP, GatedMLP
from jaxllm.nn.norm import LayerNorm, RMSNorm
from jaxllm.nn.weight import int4, scaled
from jaxllm.nn.weight.protocol import Shape
from jaxllm.nn.weight.schemes import rounded
from jaxllm.quantisation import WeightFormat
from pallas_kernels.gated_matmul import Gating, gated_matmul
from pallas_kernels.int4_matmul.packed import dequantised
from pallas_kernels.parts import Parts, Product, whole
from pallas_kernels.scaled_matmul import Inputs, RoundedRows

WIDTH, TOKENS = 32, 5
FP8 = WeightFormat("fp8", inputs="token", rounded=True)
INT8 = WeightFormat("int8", inputs="token", rounded=True)


def fed(mlp: MLP | GatedMLP, kind: WeightFormat) -> MLP | GatedMLP:
    """The feed-forward with its first weight in few bits."""
    held(mlp.reader, kind)
    return mlp


def held(linear: Linear, kind: WeightFormat) -> None:
    """Round the map's weight."""
    plain = linear.weight.get_value()
    linear.hold([kind], 1)
    for name, value in rounded(kind, plain).items():
        parameter = getattr(linear.weight, name)
        if parameter is not None:
            parameter[...] = value


def through(
    mlp: MLP | GatedMLP, norm: RMSNorm | LayerNorm, monkeypatch: pytest.MonkeyPatch
) -> tuple[Product, Inputs]:
    """What the block adds, and what the map read."""
    seen: list[Inputs] = []
    weight = type(mlp.reader.weight)
    product = weight.product

    def spied(self: object, x: Inputs, *rest: object) -> jax.Array:
        seen.append(x)
        return product(self, x, *rest)

    block = blocks.Block(attention_norm=norm, attention=nnx.Module(), mlp_norm=norm, mlp=mlp)
    x, part = jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH), jnp.float32)
    with monkeypatch.context() as patch:
        patch.setattr(weight, "product", spied)
        found = block.feed_forward(blocks.Carry(x, part), DenseContext())
    assert found.part_TD is not None
    return found.part_TD, seen[0]


@pytest.mark.parametrize("kind", [MLP, GatedMLP])
def test_a_rounded_norm_gives_the_bits_of_a_plain_one(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    init, shards = Init(nnx.Rngs(0), jnp.float32), (1,) if kind is GatedMLP else ()
    mlp, norm = fed(kind(init, WIDTH, 48, *shards, "silu"), FP8), RMSNorm(init, WIDTH, 1e-6)
    found, read = through(mlp, norm, monkeypatch)
    assert isinstance(read, RoundedRows) and read.numbers.dtype == jnp.float8_e4m3fn
    monkeypatch.setattr(blocks, "reader_of", lambda part: None)
    wanted, read = through(mlp, norm, monkeypatch)
    assert isinstance(read, jax.Array)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("kind", "norm"), [(INT8, RMSNorm), (FP8, LayerNorm)], ids=["integers", "layer norm"]
)
def test_other_maps_and_norms_stay_plain(
    kind: WeightFormat, norm: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = Init(nnx.Rngs(0), jnp.float32)
    mlp = fed(MLP(init, WIDTH, 48, "silu"), kind)
    assert isinstance(through(mlp, norm(init, WIDTH, 1e-6), monkeypatch)[1], jax.Array)


class Halves(nnx.Module):
    """A feed-forward that leaves x · 2 in two parts."""

    def __call__(self, x_TD: jax.Array, context: DenseContext) -> Parts:
        return Parts(jnp.stack([x_TD, x_TD]), (), x_TD.shape, x_TD.dtype)


@pytest.mark.parametrize("kind", ["Block", "ScaledBlock", "SandwichBlock", "PostNormBlock"])
def test_every_block_takes_a_product_in_parts(kind: str) -> None:
    init, context = Init(nnx.Rngs(0), jnp.float32), DenseContext()
    norms = {"attention_norm": RMSNorm(init, WIDTH, 1e-6), "mlp_norm": RMSNorm(init, WIDTH, 1e-6)}
    if kind == "SandwichBlock":
        norms |= {name.replace("_", "_out_"): norm for name, norm in norms.items()}
    factor = {"factor": 0.5} if kind == "ScaledBlock" else {}
    x_TD, rows_R = jax.random.normal(jax.random.key(0), (TOKENS, WIDTH)), jnp.array([3, 0])

    def found(mlp: object) -> jax.Array:
        block = getattr(blocks, kind)(attention=nnx.Module(), mlp=mlp, **norms, **factor)
        carry = block.feed_forward(blocks.Carry(x_TD), context)
        packed, (total, norm) = carry.packed(ALONE), carry.normed(norms["mlp_norm"], context)
        return jnp.concatenate([packed, total, norm, carry.rows(rows_R).settled(ALONE)])

    halves = Halves()
    np.testing.assert_allclose(
        found(halves), found(lambda x, context: whole(halves(x, context))), rtol=1e-6
    )


@pytest.mark.parametrize("shards", [1, 2])
def test_parts_stay_apart_where_a_device_has_all_outputs(shards: int) -> None:
    shape = Shape((1, 3, 4), (WIDTH,), ("shard", None, "head_dim", None), shards=shards)
    sums = jax.random.normal(jax.random.key(0), (2, TOKENS + 1, 16))
    parts = Parts(sums, (), (TOKENS, 12), jnp.dtype(jnp.float32))
    found = shape.parted(parts, ALONE)
    assert isinstance(found, Parts) == (shards == 1)
    np.testing.assert_array_equal(whole(found), parts.whole.reshape(TOKENS, 1, 3, 4))


@pytest.mark.slow
def test_the_whole_weight_of_gate_and_up_gives_what_its_groups_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    init = Init(nnx.Rngs(0), jnp.float32)
    kind = WeightFormat("int4", 16, form="zeros", rounded=True)
    mlp, x_TD = fed(GatedMLP(init, WIDTH, 48, 1, "silu"), kind), jnp.ones((TOKENS, WIDTH)) / 7
    wanted, asked = whole(mlp(x_TD, DenseContext())), []

    def gated(self: object, x: jax.Array, weight: jax.Array, gating: Gating) -> jax.Array:
        asked.append(weight.shape)
        return gated_matmul(x, weight.reshape(-1, WIDTH), gating=gating, backend="reference")

    monkeypatch.setattr(int4.op, "find_dense", lambda *given: "reference")
    monkeypatch.setattr(int4, "_dense", lambda x, w, backend: dequantised(w, WIDTH, x.dtype))
    monkeypatch.setattr(DenseContext, "gated_product", gated)
    np.testing.assert_allclose(whole(mlp(x_TD, DenseContext())), wanted, rtol=1e-5, atol=1e-7)
    assert asked == [(1, 2, 48, WIDTH)]


def test_an_activation_is_rounded_for_the_map_that_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    init, context = Init(nnx.Rngs(0), jnp.float32), DenseContext()
    mlp = GatedMLP(init, WIDTH, 48, 1, "silu")
    for linear in (mlp.gate_up, mlp.down):
        linear.weight[...] *= 10  # so that silu is far from linear
        held(linear, FP8)
    x_TD = jax.random.normal(jax.random.key(0), (TOKENS, WIDTH))
    wanted = whole(mlp(x_TD, context))
    assert mlp.gate_up.gated(x_TD, mlp.gating, context, mlp.down) is None
    monkeypatch.setattr(scaled.op, "gates", lambda target, gating: True)
    found = mlp.gate_up.gated(x_TD, mlp.gating, context, mlp.down)
    assert isinstance(found, RoundedRows) and found.shape == (TOKENS, 48)
    np.testing.assert_allclose(whole(mlp(x_TD, context)), wanted, rtol=1e-5, atol=1e-6)
