"""Random checkpoints whose weights are packed, each with a plain one of the same values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxllm import models
from jaxllm.models.config.build import outline, rules
from tests.goldens.cases import CASES

Tensors = dict[str, np.ndarray]
BLOCK = (20, 12)  # rows, columns: neither divides the sizes of these models
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
    "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
}
FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FP8_STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
FBGEMM = {
    "quant_method": "fbgemm_fp8",
    "activation_scale_ub": 0.1,  # some inputs of these models are larger
    "modules_to_not_convert": ["model.layers.0", "model.layers.1.self_attn.q_proj", "lm_head"],
}
INPUT_SCALE = 0.01
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


class Pair(NamedTuple):
    """A configuration without `quantization_config`, and the same weights in two forms."""

    config: dict[str, Any]
    plain: Tensors
    packed: Tensors


def random_tensors(config: dict[str, Any]) -> Tensors:
    """The tensors of a checkpoint for this configuration."""
    spec, rng = models.make_spec(config), np.random.default_rng(0)
    pieces = [p for rule in rules(spec, outline(spec, 1, np.float32)) for p in rule.pieces]
    sources = {piece.name: piece.source for piece in pieces}
    return {
        name: rng.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in sorted(sources.items())
    }


def fp8_pair(case: str) -> Pair:
    """The configuration of a golden, its projections as 8-bit floats in blocks."""
    config = CASES[case]
    plain, rng = random_tensors(config), np.random.default_rng(1)
    packed = dict(plain)
    for name in plain:
        if plain[name].ndim == 2 and ("_proj" in name or ".experts." in name):
            values = plain[name].astype(ml_dtypes.float8_e4m3fn)
            grid = [-(-n // size) for n, size in zip(values.shape, BLOCK, strict=True)]
            scales = rng.uniform(0.01, 2, grid).astype(np.float32)
            spread = np.repeat(np.repeat(scales, BLOCK[0], 0), BLOCK[1], 1)
            rows, columns = values.shape
            plain[name] = values.astype(np.float32) * spread[:rows, :columns]
            packed |= {name: values, f"{name}_scale_inv": scales}
    return Pair(config, plain, packed)


def fp8_tensor_pair(case: str, static: bool = False, suffix: str = "weight_scale") -> Pair:
    """The same with one scale for each projection, and one for its inputs where they are static."""
    config = CASES[case]
    plain, rng = random_tensors(config), np.random.default_rng(1)
    packed = dict(plain)
    for name in plain:
        if plain[name].ndim == 2 and "_proj" in name:
            values = (plain[name] * 100).astype(ml_dtypes.float8_e4m3fn)
            scale = np.float32(rng.uniform(0.005, 0.02))
            plain[name] = values.astype(np.float32) * scale
            owner = name.removesuffix("weight")
            packed |= {name: values, owner + suffix: np.array(scale, np.float32)}
            if static:
                packed[f"{owner}input_scale"] = np.array([INPUT_SCALE], np.float32)
    return Pair(config, plain, packed)


def fp8_row_pair(case: str, left_out: tuple[str, ...] = ()) -> Pair:
    """The same with one scale for each row, bfloat16 for some; what lies in modules that are
    `left_out` is plain."""
    config = CASES[case]
    plain, rng = random_tensors(config), np.random.default_rng(1)
    packed = dict(plain)
    for index, name in enumerate(plain):
        if plain[name].ndim == 2 and "_proj" in name and not name.startswith(left_out):
            values = (plain[name] * 100).astype(ml_dtypes.float8_e4m3fn)
            stored = np.float32 if index % 2 else ml_dtypes.bfloat16
            scale = rng.uniform(0.005, 0.02, (len(values), 1)).astype(stored)
            plain[name] = values.astype(np.float32) * scale.astype(np.float32)
            packed |= {name: values, f"{name}_scale": scale}
    return Pair(config, plain, packed)


def exponent_pair(case: str) -> Pair:
    """The same, twice as wide, with exponents of 32 columns, of which 48 are no multiple."""
    config = CASES[case] | {"hidden_size": 2 * CASES[case]["hidden_size"]}
    plain, rng = random_tensors(config), np.random.default_rng(1)
    packed = dict(plain)
    for name in plain:
        if plain[name].ndim == 2 and "_proj" in name:
            values = (plain[name] * 100).astype(ml_dtypes.float8_e4m3fn)
            rows, columns = values.shape
            exponents = rng.integers(118, 121, (rows, -(-columns // 32)), np.uint8)
            scale = np.exp2(np.repeat(exponents, 32, axis=1).astype(np.float32) - 127)
            plain[name] = values.astype(np.float32) * scale[:, :columns]
            packed |= {name: values, f"{name}_scale": exponents}
    return Pair(config, plain, packed)


def integer_pair(case: str, group: int | None = None) -> Pair:
    """The same as integers of 8 bits, with a scale for each row or each group of its columns."""
    config = CASES[case]
    plain, rng = random_tensors(config), np.random.default_rng(1)
    packed = dict(plain)
    for name in plain:
        if plain[name].ndim == 2 and "_proj" in name:
            rows, columns = plain[name].shape
            size = group or columns
            scale = rng.uniform(0.001, 0.002, (rows, columns // size)).astype(np.float32)
            values = rng.integers(-127, 128, (rows, columns)).astype(np.int8)
            plain[name] = values.astype(np.float32) * np.repeat(scale, size, axis=1)
            packed |= {name: values, f"{name}_scale": scale}
    return Pair(config, plain, packed)


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A configuration of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if weights["type"] == "int" else "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def mxfp4_pair() -> Pair:
    """A gpt-oss of width 32 whose experts are 4-bit floats."""
    config = CASES["gpt-oss-fused"] | {"intermediate_size": 64}
    plain, rng = random_tensors(config), np.random.default_rng(1)
    packed = dict(plain)
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    for name in plain:
        if not name.endswith("_proj") or ".experts." not in name:
            continue
        experts, inp, out = plain[name].shape
        code = rng.integers(0, 16, (experts, out, inp), np.uint8)
        exponents = rng.integers(118, 126, (experts, out, inp // 32), np.uint8)
        signed = numbers[code & 7] * np.where(code & 8, np.float32(-1), np.float32(1))
        values = signed * np.exp2(np.repeat(exponents, 32, -1).astype(np.float32) - 127)
        plain[name] = values.swapaxes(1, 2).copy()
        blocks = (code[..., 0::2] | code[..., 1::2] << 4).reshape(experts, out, inp // 32, 16)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
    return Pair(config, plain, packed)


def write(path: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """A model directory."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path
