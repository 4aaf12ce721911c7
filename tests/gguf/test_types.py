"""Blocks stand for the numbers that ggml makes of them."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.gguf.file import StoredTensor
from jaxllm.gguf.types import TABLES, TYPES
from tests.gguf.writer import MXFP4
from tests.goldens.golden import HERE

RANGES = {"I8": (-128, 127), "I4": (-8, 7), "U5": (0, 31)}
QUANTISED = sorted(number for number, kind in TYPES.items() if not kind.plain)


def golden(number: int) -> tuple[StoredTensor, np.ndarray]:
    """A tensor of random blocks, and its numbers by the gguf package."""
    with np.load(HERE / "gguf_blocks.npz", allow_pickle=False) as stored:
        blocks, values = stored[f"{number}_blocks"], stored[f"{number}_values"]
    return StoredTensor("t", TYPES[number], values.shape, memoryview(blocks.tobytes())), values


@pytest.mark.parametrize("number", QUANTISED)
def test_numbers_are_bit_for_bit_those_of_ggml(number: int) -> None:
    tensor, values = golden(number)
    found = np.asarray(tensor.deferred())
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("number", QUANTISED)
def test_a_part_is_read_without_the_rest(number: int) -> None:
    tensor, values = golden(number)
    rows, columns = (1, 2), (5, values.shape[1] - 3)
    np.testing.assert_array_equal(tensor.deferred().read((rows, columns)), values[1:2, 5:-3])


def test_a_scale_that_is_infinite_is_refused() -> None:
    tensor, _ = golden(8)
    blocks = np.frombuffer(tensor.data, np.uint8).copy()
    blocks[:2] = np.array([np.inf], np.float16).view(np.uint8)
    broken = StoredTensor(
        "blk.0.attn_q.weight", tensor.type, tensor.shape, memoryview(blocks.tobytes())
    )
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.weight has a scale"):
        np.asarray(broken.deferred())


@pytest.mark.parametrize(("exponent", "refused"), [(252, False), (253, True), (255, True)])
def test_a_scale_of_floats_of_4_bits_makes_no_number_infinite(exponent: int, refused: bool) -> None:
    blocks = np.zeros(1, TYPES[MXFP4].layout)
    blocks["e"], blocks["q"] = exponent, 0x77  # 6
    tensor = StoredTensor("t.weight", TYPES[MXFP4], (1, 32), memoryview(blocks.tobytes()))
    for numbers in (tensor.deferred(), tensor.parts()[1]):
        if refused:
            with pytest.raises(ConfigError, match=r"t\.weight has a scale that makes numbers inf"):
                np.asarray(numbers)
        else:
            assert np.isfinite(np.asarray(numbers)).all()


@pytest.mark.parametrize("number", QUANTISED)
def test_integers_with_scales_and_offsets_of_groups_are_the_numbers(number: int) -> None:
    tensor, values = golden(number)
    integers, scales, *offsets = (np.asarray(part) for part in tensor.parts())
    kind = str(tensor.type.integers)
    low, high = RANGES.get(kind, (0, 15))
    assert low <= integers.min()
    assert integers.max() <= high
    assert scales.shape == (2, values.shape[1] // tensor.type.group)
    numbers = TABLES[kind][integers] if kind in TABLES else integers
    found = numbers.astype(np.float32) * np.repeat(scales, tensor.type.group, axis=1)
    for each in offsets:
        found += np.repeat(each, tensor.type.group, axis=1)
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(np.asarray(tensor.parts()[1][1:2, 1:3]), scales[1:2, 1:3])
