"""Packed tensors against the definitions of their formats, and what a configuration may say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.models.config.quantisation import weight_scheme
from jaxllm.quantisation import PackedTensor, WeightFormat, common_name, methods, read_scheme


class Header(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def packed(
    method: str, settings: dict[str, Any], stored: dict[str, tuple[str, tuple[int, ...]]]
) -> list[PackedTensor]:
    headers = {name: Header(*own) for name, own in stored.items()}
    return list(read_scheme(method, settings).tensors(headers))


def matrix(shape: tuple[int, int], block: Sequence[int]) -> PackedTensor:
    settings = {"weight_block_size": list(block)}
    (found,) = packed("fp8", settings, {"a.weight": ("F8_E4M3", shape)})
    return found


def finite_bytes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers of float8_e4m3fn, zeros and subnormals among them."""
    values = rng.integers(0, 256, shape, np.uint8)
    return np.where(values & 0x7F == 0x7F, values - 1, values).astype(np.uint8)


def whole(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in shape)


def cuts(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Blocks of an array: whole axes, their middles, and single entries at their ends."""
    yield from product(*([(0, n), (n // 3, n - 1), (0, 1), (n - 1, n)] for n in shape))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float8_e8m0fnu"])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((8, 12), (4, 4)), ((7, 10), (4, 3)), ((3, 5), (128, 128)), ((6, 4), (1, 4))],
)
def test_a_block_of_8_bit_floats_is_multiplied_with_its_scale(
    shape: tuple[int, int], block: tuple[int, int], stored: str
) -> None:
    rng, found = np.random.default_rng(0), matrix(shape, block)
    grid = tuple(math.ceil(n / size) for n, size in zip(shape, block, strict=True))
    assert [(part.name, part.shape) for part in found.parts] == [
        ("a.weight", shape),
        ("a.weight_scale_inv", grid),
    ]
    values = finite_bytes(rng, shape).view(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(1e-4, 3, grid).astype(stored)
    expected = np.empty(shape, np.float32)
    for row, column in np.ndindex(shape):
        scale = np.float32(scales[row // block[0], column // block[1]])
        expected[row, column] = np.float32(values[row, column]) * scale
    for bounds in cuts(shape):
        own = found.unpack([values, scales], bounds)
        assert own.dtype == np.float32
        np.testing.assert_array_equal(own, expected[tuple(slice(*each) for each in bounds)])


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_a_scale_that_cannot_be_one_is_named_where_it_is_used(scale: float) -> None:
    found, values = matrix((4, 4), (2, 2)), np.zeros((4, 4), ml_dtypes.float8_e4m3fn)
    scales = np.array([[1, 1], [1, scale]], np.float32)
    with pytest.raises(ConfigError, match=r"a\.weight_scale_inv has the scale (nan|inf|-1\.0); "):
        found.unpack([values, scales], whole((4, 4)))
    assert not found.unpack([values, scales], ((0, 2), (0, 4))).any()


def test_zero_is_the_scale_of_a_block_of_zeros() -> None:
    found, scales = matrix((2, 2), (2, 2)), np.zeros((1, 1), np.float32)
    ones = np.ones((2, 2), ml_dtypes.float8_e4m3fn)
    assert not found.unpack([ones, scales], whole((2, 2))).any()


# Table 5 of the OCP Microscaling Formats specification 1.0, E2M1
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_4_bit_floats_lie_two_in_a_byte_and_32_share_an_exponent() -> None:
    (found,) = packed("mxfp4", {}, {"x_blocks": ("U8", (2, 5, 3, 16))})
    assert (found.name, found.shape) == ("x", (2, 96, 5))
    assert [(part.name, part.shape) for part in found.parts] == [
        ("x_blocks", (2, 5, 3, 16)),
        ("x_scales", (2, 5, 3)),
    ]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 5, 3, 16), np.uint8)
    exponents = rng.integers(0, 253, (2, 5, 3), np.uint8)
    exponents[0, :2, 0] = 0, 252
    expected = np.empty((2, 96, 5), np.float32)
    for expert, entry, out in np.ndindex(expected.shape):
        byte = int(blocks[expert, out, entry // 32, entry % 32 // 2])
        number = FP4[byte >> 4 if entry % 2 else byte & 15]
        expected[expert, entry, out] = math.ldexp(
            number, int(exponents[expert, out, entry // 32]) - 127
        )
    for bounds in cuts(expected.shape):
        own = found.unpack([blocks, exponents], bounds)
        assert own.dtype == np.float32
        np.testing.assert_array_equal(own, expected[tuple(slice(*each) for each in bounds)])
    np.testing.assert_array_equal(expected.astype(ml_dtypes.bfloat16).astype(np.float32), expected)


@pytest.mark.parametrize("exponent", [253, 255])
def test_an_exponent_that_gives_no_finite_number_is_refused(exponent: int) -> None:
    (found,) = packed("mxfp4", {}, {"x_blocks": ("U8", (1, 2, 1, 16))})
    arrays = [np.zeros((1, 2, 1, 16), np.uint8), np.array([[[3], [exponent]]], np.uint8)]
    with pytest.raises(ConfigError, match=f"x_scales has the exponent {exponent}; .* at most 252"):
        found.unpack(arrays, whole((1, 32, 2)))
    assert not found.unpack(arrays, ((0, 1), (0, 32), (0, 1))).any()


def test_tensors_of_other_types_are_left_as_they_are() -> None:
    plain = {"a.weight": ("BF16", (4, 4)), "b.bias": ("F8_E4M3", (4, 4)), "c.weight": ("U8", (4,))}
    assert packed("fp8", {"weight_block_size": [2, 2]}, plain) == []
    assert packed("mxfp4", {}, plain | {"d_blocks": ("U8", (4, 16))}) == []


def test_schemes_are_found_by_their_files() -> None:
    known = [
        "auto-round",
        "awq",
        "bitsandbytes",
        "compressed-tensors",
        "fbgemm-fp8",
        "fp8",
        "gguf",
        "gptq",
        "modelopt",
        "mxfp4",
    ]
    assert methods() == known
    assert methods() == [*map(common_name, ("Auto_Round", *known[1:]))]
    assert read_scheme("fp8", {"weight_block_size": [128, 64]}).title == "fp8 in blocks of 128 × 64"
    with pytest.raises(ConfigError, match=f"methods that are read are {', '.join(known)}"):
        read_scheme("quip", {})


@pytest.mark.parametrize("size", [128, [128], [128, 128, 1], [0, 128], [True, 128], ["128", 1]])
def test_a_block_has_two_sizes(size: object) -> None:
    with pytest.raises(
        ConfigError, match=r"weight_block_size is .*; two positive integers"
    ) as error:
        read_scheme("fp8", {"weight_block_size": size})
    assert repr(size) in str(error.value)


def test_one_scale_may_serve_a_matrix_and_another_its_inputs() -> None:
    stored = {
        "a.weight": ("F8_E4M3", (4, 6)),
        "a.weight_scale": ("F32", ()),
        "a.input_scale": ("F32", (1,)),
    }
    (found,) = packed("fp8", {"activation_scheme": "static"}, stored)
    assert found.format == WeightFormat("fp8", None, "given")
    values = np.full((4, 6), 2, ml_dtypes.float8_e4m3fn)
    arrays = {"a.weight": values, "a.weight_scale": np.float32(3), "a.input_scale": np.ones(1)}
    made = {
        leaf.name: leaf.unpack([np.asarray(arrays[p.name]) for p in leaf.parts], whole(leaf.shape))
        for leaf in (found, *found.leaves())
    }
    assert {name: array.shape for name, array in made.items()} == {
        "a.weight": (4, 6),
        "a.weight.values": (4, 6),
        "a.weight.scale": (4, 1),
        "a.weight.input_scale": (1, 1),
    }
    assert (made["a.weight"] == 6).all() and (made["a.weight.scale"] == 3).all()


def test_rows_of_8_bit_floats_have_scales_and_their_inputs_a_bound() -> None:
    stored = {"a.weight": ("F8_E4M3", (4, 6)), "b.weight": ("BF16", (4, 6))}
    (found,) = packed("fbgemm_fp8", {"activation_scale_ub": 600}, stored)
    assert found.format == WeightFormat("fp8", None, "token", bound=600.0)
    assert found.format.title.endswith("inputs with scales of tokens up to 600")
    assert [(part.name, part.shape) for part in found.parts] == [
        ("a.weight", (4, 6)),
        ("a.weight_scale", (4, 1)),
    ]


@pytest.mark.parametrize("bound", [0, -1.0, True, None, "1200", float("inf"), float("nan")])
def test_a_bound_of_inputs_is_a_positive_number(bound: object) -> None:
    with pytest.raises(ConfigError, match=r"activation_scale_ub is .*; it must be a positive"):
        read_scheme("fbgemm_fp8", {"activation_scale_ub": bound})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation_scheme": "none"}, "activation_scheme is 'none'; it must be one of dynamic"),
        (
            {"activation_scheme": "static", "weight_block_size": [2, 2]},
            "activation_scheme is 'static'; with weight_block_size it is 'dynamic'",
        ),
    ],
)
def test_settings_that_no_checkpoint_has_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_scheme("fp8", settings)


def test_integers_of_4_and_of_8_bits_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="load_in_8bit and load_in_4bit are both true"):
        read_scheme("bitsandbytes", {"load_in_8bit": True, "load_in_4bit": True})


def test_a_method_of_two_lines_is_named_in_one() -> None:
    with pytest.raises(ConfigError, match=r"\('a\\nb'\) is not supported") as error:
        weight_scheme({"quantization_config": {"quant_method": "a\nb"}})
    assert "\n" not in str(error.value)
