"""Checkpoints of bitsandbytes, quantised here as its papers say, compute what their values do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import models, weights
from jaxllm.config import ConfigError
from jaxllm.quantisation import WeightFormat, read_scheme
from tests.goldens.cases import CASES
from tests.weights.packed import Pair, Tensors, random_tensors, write
from tests.weights.test_held import held, logits
from tests.weights.test_packed import both, load

# As files hold them
NF4 = np.float32(
    "-1 -0.6961928 -0.52507305 -0.3949175 -0.28444138 -0.18477343 -0.091050036 0 0.0795803 "
    "0.1609302 0.2461123 0.33791524 0.44070983 0.562617 0.72295684 1".split()
)
FP4 = np.float32("0 .0052083333 .66666667 1 .33333333 .5 .16666667 .25".split())
FP4 = np.concatenate([FP4, -FP4])
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True}
BLOCK, NESTED, OFFSET = 16, 8, 0.03


def blocks(weight: np.ndarray, table: np.ndarray, kind: str, nested: bool) -> tuple[Tensors, Any]:
    """The tensors of a matrix `weight`, and its values: nearest numbers of blocks, one after the
    other whatever the rows are."""
    flat = np.pad(weight.reshape(-1), (0, -weight.size % BLOCK)).reshape(-1, BLOCK)
    maxima = np.abs(flat).max(axis=1)
    state = {"quant_type": kind, "blocksize": BLOCK, "shape": weight.shape, "dtype": "float32"}
    stored = {"quant_map": table, "absmax": maxima}
    if nested:
        outer = np.pad(maxima - OFFSET, (0, -len(maxima) % NESTED)).reshape(-1, NESTED)
        largest = np.abs(outer).max(axis=1)
        levels = np.linspace(-1, 1, 256, dtype=np.float32)
        bytes_ = np.abs(outer[..., None] / largest[:, None, None] - levels).argmin(axis=-1)
        stored["absmax"] = bytes_.reshape(-1)[: len(maxima)].astype(np.uint8)
        stored |= {"nested_absmax": largest.astype(np.float32), "nested_quant_map": levels}
        state |= {"nested_blocksize": NESTED, "nested_offset": OFFSET, "nested_dtype": "float32"}
        wide = np.repeat(largest, NESTED)[: len(maxima)].astype(np.float32)
        maxima = levels[stored["absmax"]] * wide + np.float32(OFFSET)
    code = np.abs(flat[..., None] / np.maximum(maxima, 1e-9)[:, None, None] - table).argmin(-1)
    values = (table[code] * maxima[:, None]).reshape(-1)[: weight.size].reshape(weight.shape)
    numbers = np.pad(code.reshape(-1)[: weight.size], (0, weight.size % 2)).astype(np.uint8)
    text = json.dumps(state).encode()
    stored |= {f"quant_state.bitsandbytes__{kind}": np.frombuffer(text, np.uint8)}
    found = {f".{leaf}": array for leaf, array in stored.items()}
    return found | {"": (numbers[0::2] << 4 | numbers[1::2])[:, None]}, values.astype(np.float32)


def rows(weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    largest = np.abs(weight).max(axis=1)
    numbers = np.rint(weight * (127 / largest)[:, None]).astype(np.int8)
    return {"": numbers, "SCB": largest}, numbers * (largest / np.float32(127))[:, None]


KINDS = {
    "nf4": (FOUR, lambda w: blocks(w, NF4, "nf4", nested=False), WeightFormat("nf4", BLOCK)),
    "nested": (FOUR, lambda w: blocks(w, NF4, "nf4", nested=True), WeightFormat("nf4", BLOCK)),
    "fp4": (
        FOUR | {"bnb_4bit_quant_type": "fp4"},
        lambda w: blocks(w, FP4, "fp4", nested=True),
        None,
    ),
    "int8": (EIGHT, rows, WeightFormat("int8")),
}


def pair(case: str, kind: str) -> tuple[Pair, dict[str, Any]]:
    settings, make, _ = KINDS[kind]
    plain = random_tensors(CASES[case])
    packed = dict(plain)
    for name, value in plain.items():
        if value.ndim == 2 and "_proj" in name:
            stored, plain[name] = make(value)
            module = name.removesuffix("weight")
            packed |= {
                (module if leaf == "SCB" else name) + leaf: own for leaf, own in stored.items()
            }
    return Pair(CASES[case], plain, packed), settings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"), [("nested", "llama-gqa"), ("nf4", "glm-biases"), ("int8", "llama-gqa")]
)
def test_weights_compute_what_their_values_do(tmp_path: Path, kind: str, case: str) -> None:
    made, settings = pair(case, kind)
    path, spec = held(tmp_path, made, settings)
    assert set(spec.formats.values()) <= {KINDS[kind][2]}
    found = logits(path, spec)
    plain = write(tmp_path / "plain", made.config, made.plain)
    np.testing.assert_allclose(found, logits(plain, models.read_spec(plain)), atol=2e-5)


@pytest.mark.parametrize("kind", ["nested", "fp4", "int8"])
def test_values_are_those_of_the_papers(tmp_path: Path, kind: str) -> None:
    made, settings = pair("llama-gqa", kind)
    packed, plain = both(tmp_path, made, settings)
    for own, other in zip(load(packed), load(plain), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-7)


def test_blocks_that_cross_rows_become_plain_numbers(tmp_path: Path) -> None:
    made, settings = pair("llama-head-dim-sharded", "nf4")
    shapes = {n: v.shape for n, v in made.plain.items() if "_proj" in n}
    path, spec = held(tmp_path, made, settings)
    crossing = {n.removesuffix(".weight") for n, (_, k) in shapes.items() if k % BLOCK}
    assert not crossing & set(spec.formats)
    for own, other in zip(
        load(path), load(write(tmp_path / "x", made.config, made.plain)), strict=True
    ):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-7)


def logits_of(path: Path) -> np.ndarray:
    spec = models.read_spec(path)
    return logits(path, replace(spec, formats=weights.weight_formats(path, spec, None)))


UP = "model.layers.0.mlp.up_proj.weight"
STATE = f"{UP}.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            f"{UP}.absmax",
            np.ones(5, np.float32),
            r"up_proj.weight.absmax has shape \[5\], expected",
        ),
        (f"{UP}.absmax", np.full(96, np.nan, np.float32), "absmax has the scale nan"),
        (f"{UP}.quant_map", np.zeros(16, np.float32), "quant_map does not hold the numbers of nf4"),
        (UP, np.zeros((9, 1), np.uint8), r"up_proj.weight has shape \[9, 1\], expected"),
        (STATE, np.frombuffer(b"{}", np.uint8), "has no legal shape, blocksize and offset"),
        (STATE, np.frombuffer(b"\x00\xff", np.uint8), "has no legal shape, blocksize and offset"),
        (STATE, np.frombuffer(b'{"shape": [48, 32], "blocksize": 0}', np.uint8), "no legal shape"),
    ],
    ids=["shape", "nan", "map", "numbers", "empty", "no JSON", "blocksize"],
)
def test_what_is_wrong_with_4_bits_is_named(
    tmp_path: Path, name: str, value: np.ndarray, message: str
) -> None:
    made, settings = pair("llama-gqa", "nf4")
    made.packed[name] = value
    path = write(tmp_path / "x", made.config | {"quantization_config": settings}, made.packed)
    with pytest.raises(ConfigError, match=message) as error:
        logits_of(path)
    assert "\n" not in str(error.value)


def test_a_map_whose_numbers_are_not_finite_is_named(tmp_path: Path) -> None:
    made, settings = pair("llama-gqa", "fp4")
    made.packed[f"{UP}.quant_map"] = np.full(16, np.inf, np.float32)
    path = write(tmp_path / "x", made.config | {"quantization_config": settings}, made.packed)
    with pytest.raises(ConfigError, match="quant_map has a number that is not finite"):
        load(path)


def test_what_settings_are_not_read_is_named() -> None:
    for settings in ({}, {"load_in_4bit": True, "bnb_4bit_quant_type": "int3"}):
        with pytest.raises(ConfigError, match=r"load_in_8bit, or load_in_4bit with .* is expected"):
            read_scheme("bitsandbytes", settings)
