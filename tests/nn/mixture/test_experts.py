"""Routed feed-forwards, and the checkpoint tensors that fill all experts' maps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.mesh import make_mesh, over_experts, sharding
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.experts import UP, ExpertMaps, Experts, MixtureMLP, SharedExpert, Split
from jaxllm.nn.mixture.routers import Router, Routing
from jaxllm.nn.mlp import ACTIVATIONS, GatedMLP
from jaxllm.nn.rules import Rule
from jaxllm.weights.blocks import read_block
from jaxllm.weights.dummy import dummy
from pallas_kernels.parts import whole

TOKENS, EXPERTS, CHOICES, WIDTH, INNER = 21, 5, 2, 6, 4
SINGLE = ("m.experts.{}.gate.weight", "m.experts.{}.up.weight")
FUSED = "m.experts.gate_up"
WHOLE = Split()


def init() -> Init:
    return Init(nnx.Rngs(3), jnp.float32)


def maps(parts: int = 2, split: Split = WHOLE) -> ExpertMaps:
    return ExpertMaps(init(), (EXPERTS, 2 * INNER, WIDTH), UP, parts, split=split)


@pytest.mark.parametrize("shared", [None, "plain", "gated"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_mixture_is_the_weighted_sum_of_a_tokens_experts(
    activation: str, shared: str | None
) -> None:
    mlp = GatedMLP(init(), WIDTH, 2 * INNER, 1, activation)
    parts = {None: None, "plain": mlp, "gated": SharedExpert(init(), mlp, WIDTH)}
    router = Router(init(), WIDTH, EXPERTS, Routing(CHOICES))
    experts = Experts.plain(init(), EXPERTS, WIDTH, INNER, activation)
    module = MixtureMLP(router, experts, parts[shared])
    x = jax.random.normal(jax.random.key(0), (TOKENS, WIDTH)) * 20
    context = DenseContext()
    expert_TK, weight_TK = router.routing.choose(router.logits(x))
    act = ACTIVATIONS[activation]
    wanted = []
    for t in range(TOKENS):
        total = jnp.zeros(WIDTH)
        for e, w in zip(np.asarray(expert_TK)[t], weight_TK[t], strict=True):
            gate, up = jnp.split(experts.gate_up.weight[...][e] @ x[t], 2)
            total += w * (experts.down.weight[...][e] @ (act(gate) * up))
        wanted.append(total)
    expected = jnp.stack(wanted)
    if shared == "plain":
        expected += mlp(x, context)
    if shared == "gated":
        gate = parts["gated"].gate  # type: ignore[union-attr]
        expected += jax.nn.sigmoid(x @ gate.weight[...].T) * mlp(x, context)
    np.testing.assert_allclose(whole(module(x, context)), expected, rtol=1e-4, atol=1e-5)


def test_a_group_of_devices_has_experts_of_its_own_and_each_device_a_share_of_their_width() -> None:
    axes, mesh = maps().weight.get_metadata("axes"), make_mesh(4)
    for groups, own in ((1, (8, 2, 4)), (2, (4, 4, 4)), (4, (2, 8, 4))):
        assert sharding(over_experts(mesh, groups), axes).shard_shape((8, 8, 4)) == own


def test_checkpoints_may_hold_one_tensor_for_each_expert_or_one_for_all() -> None:
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((EXPERTS, 2 * INNER, WIDTH)).astype(np.float32)
    single = {
        name.format(e): whole[e, part * INNER : (part + 1) * INNER]
        for part, name in enumerate(SINGLE)
        for e in range(EXPERTS)
    }
    (rule,) = maps().rules(*SINGLE, FUSED)
    like = jax.ShapeDtypeStruct(whole.shape, jnp.float32)
    for tensors in (single, {FUSED: whole}):
        held: Rule = rule.for_tensors(tensors)
        assert {piece.name for piece in held.pieces} == set(tensors) and not held.others
        every = tuple(slice(0, size) for size in whole.shape)
        np.testing.assert_array_equal(read_block(held, like, every, tensors.__getitem__), whole)
    some = (slice(1, 3), slice(0, 2 * INNER), slice(0, WIDTH))
    got = read_block(rule.for_tensors(single), like, some, single.__getitem__)
    np.testing.assert_array_equal(got, whole[1:3])


@pytest.mark.parametrize("tensors", ["single", "fused"])
def test_devices_read_their_own_experts_and_rows_and_zeros_for_experts_that_nobody_has(
    tensors: str,
) -> None:
    numbers = np.arange(EXPERTS * 2 * INNER * WIDTH, dtype=np.float32) + 1
    whole = numbers.reshape(EXPERTS, 2, INNER, WIDTH)
    given = {FUSED: whole.reshape(EXPERTS, 2 * INNER, WIDTH)}
    if tensors == "single":
        given = {
            name.format(e): whole[e, part] for part, name in enumerate(SINGLE) for e in range(5)
        }
    (rule,) = maps(split=Split(groups=2, shards=2)).rules(*SINGLE, FUSED)
    like, held = jax.ShapeDtypeStruct((6, 2 * INNER, WIDTH), jnp.float32), rule.for_tensors(given)
    for group, shard in np.ndindex(2, 2):
        index = slice(3 * group, 3 * group + 3), slice(INNER * shard, INNER * shard + INNER)
        found = read_block(held, like, (*index, slice(0, WIDTH)), given.__getitem__)
        own = whole[index[0], :, 2 * shard : 2 * shard + 2].reshape(-1, INNER, WIDTH)
        np.testing.assert_array_equal(found[: len(own)], own)
        assert not found[len(own) :].any() and len(own) == (2 if group else 3)


def test_the_first_form_is_asked_for_where_a_checkpoint_holds_none() -> None:
    (rule,) = maps().rules(*SINGLE, FUSED)
    assert rule.for_tensors(()).pieces == rule.pieces
    assert len(rule.pieces) == 2 * EXPERTS


def test_a_fused_map_alone_needs_no_names_of_experts() -> None:
    (rule,) = maps(1).rules(FUSED)
    assert [piece.name for piece in rule.pieces] == [FUSED] and not rule.others


def test_random_experts_differ_and_do_not_depend_on_their_number() -> None:
    def drawn(experts: int) -> np.ndarray:
        shape = (experts, 2 * INNER, WIDTH)
        module = ExpertMaps(init(), shape, UP, 2)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=device)
        return np.asarray(next(dummy(list(module.rules(*SINGLE)), [like], 7)))

    few, many = drawn(2), drawn(3)
    np.testing.assert_array_equal(many[:2], few)
    halves = many.reshape(6, INNER, WIDTH)
    assert len({half.tobytes() for half in halves}) == 6
    assert 0.5 < many.std() * WIDTH**0.5 < 1.5


def test_the_only_expert_of_a_mixture_may_have_a_tensor_of_its_own() -> None:
    only = ExpertMaps(init(), (1, WIDTH, INNER), ("expert", "embed", None))
    (rule,) = only.rules("m.experts.{}.down.weight", "m.experts.down")
    assert [[(piece.name, piece.source) for piece in form] for form in rule.forms] == [
        [("m.experts.0.down.weight", (WIDTH, INNER))],
        [("m.experts.down", (1, WIDTH, INNER))],
    ]
