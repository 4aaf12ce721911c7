"""Parameters from pieces, shard by shard, and random ones of the same layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.mesh import make_mesh, sharding
from jaxllm.nn.rules import Piece, Rule
from jaxllm.weights.blocks import place, read_block
from jaxllm.weights.check import mismatch
from jaxllm.weights.dummy import dummy

FUSED = Rule(
    "p",
    (
        Piece("a", (8, 3), (4, 2, 3)),
        Piece("b", (2, 3), (2, 1, 3), start=2, repeat=2),
    ),
)
TENSORS = {
    "a": np.arange(24, dtype=np.float32).reshape(8, 3),
    "b": 100 + np.arange(6, dtype=np.float32).reshape(2, 3),
}
EXPECTED = np.concatenate(
    [TENSORS["a"].reshape(4, 2, 3), TENSORS["b"].reshape(2, 1, 3).repeat(2, axis=0)], axis=1
)


def like(shards: int, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
    where = sharding(make_mesh(shards), ("shard", None, "embed"))
    return jax.ShapeDtypeStruct((4, 3, 3), dtype, sharding=where)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_pieces_lie_side_by_side_and_repeat(shards: int) -> None:
    placed = place(FUSED, like(shards), TENSORS.__getitem__)
    np.testing.assert_array_equal(placed, EXPECTED)
    assert {part.data.shape for part in placed.addressable_shards} == {(4 // shards, 3, 3)}


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_block_is_the_slice_of_the_whole(first: int, count: int) -> None:
    index = (slice(first, first + count), slice(None), slice(None))
    found = read_block(FUSED, like(1), index, TENSORS.__getitem__)
    np.testing.assert_array_equal(found, EXPECTED[first : first + count])


def test_a_parameter_of_one_piece_is_cut_along_any_axis() -> None:
    rule = Rule("p", (Piece("a", (8, 3), (4, 2, 3)),))
    shape = jax.ShapeDtypeStruct((4, 2, 3), jnp.float32)
    index = (slice(1, 3), slice(1, None), slice(0, 2))
    found = read_block(rule, shape, index, TENSORS.__getitem__)
    np.testing.assert_array_equal(found, TENSORS["a"].reshape(4, 2, 3)[1:3, 1:, :2])


def test_float16_names_the_parameter_that_does_not_fit() -> None:
    tensors = TENSORS | {"b": np.full((2, 3), 70000, np.float32)}
    with pytest.raises(ConfigError, match="p has values beyond the range of float16"):
        read_block(FUSED, like(1, jnp.float16), (slice(None),) * 3, tensors.__getitem__)
    fine = TENSORS | {"b": np.full((2, 3), 65504, np.float32)}
    found = read_block(FUSED, like(1, jnp.float16), (slice(None),) * 3, fine.__getitem__)
    assert found[:, 2].tolist() == [[65504.0] * 3] * 4


@pytest.mark.parametrize(
    ("dtype", "shape", "found"),
    [
        ("F32", (8, 3), None),
        ("F32", (3, 8), "a has shape [3, 8], expected [8, 3]"),
        ("I8", (8, 3), "a has dtype I8, which is not one of F32, BF16"),
        ("I8", (24,), "a has shape [24], expected [8, 3]"),
    ],
)
def test_a_tensor_that_cannot_be_a_piece_says_why(
    dtype: str, shape: tuple[int, ...], found: str | None
) -> None:
    assert mismatch(FUSED.pieces[0], dtype, shape, ("F32", "BF16")) == found


RULES = [
    FUSED,
    Rule("norm", (Piece("n.weight", (512,), (512,)),)),
    Rule("bias", (Piece("n.bias", (512,), (512,)),)),
    Rule("matrix", (Piece("m.weight", (64, 256), (64, 256)),)),
]


def drawn(seed: int, shards: int = 1) -> dict[str, np.ndarray]:
    plain = sharding(make_mesh(shards), ())
    shapes = [(512,), (512,), (64, 256)]
    likes = [like(shards)] + [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=plain) for shape in shapes
    ]
    arrays = dummy(RULES, likes, seed)
    return {rule.parameter: np.asarray(x) for rule, x in zip(RULES, arrays, strict=True)}


def test_random_weights_are_laid_out_as_loaded_ones() -> None:
    found = drawn(0)["p"]
    assert found.shape == (4, 3, 3)
    np.testing.assert_array_equal(found[0, 2], found[1, 2])
    np.testing.assert_array_equal(found[2, 2], found[3, 2])
    assert not np.array_equal(found[0, 2], found[2, 2])
    assert len(np.unique(found[:, :2])) == 24


def test_random_weights_have_the_spread_that_keeps_activations_near_one() -> None:
    found = drawn(0)
    assert abs(found["matrix"].std() * 16 - 1) < 0.05 and abs(found["matrix"].mean()) < 0.01
    assert abs(found["norm"].mean() - 1) < 0.01 and 0 < found["norm"].std() < 0.05
    assert abs(found["bias"].mean()) < 0.01 and 0 < found["bias"].std() < 0.05


def test_random_weights_follow_seed_and_name_and_not_the_number_of_devices() -> None:
    one, again, other, many = drawn(7), drawn(7), drawn(8), drawn(7, shards=4)
    for name in one:
        np.testing.assert_array_equal(one[name], again[name])
        np.testing.assert_array_equal(one[name], many[name])
        assert not np.array_equal(one[name], other[name])
