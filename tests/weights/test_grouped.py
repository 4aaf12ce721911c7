"""Checkpoints of AWQ, GPTQ, auto-round and compressed-tensors give the parameters of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import models, weights
from jaxllm.config import ConfigError
from tests.goldens.cases import CASES
from tests.quantisation.grouped_checkpoints import (
    Made,
    auto_round,
    awq,
    awq_gemv,
    gptq,
    pack_quantized,
)
from tests.weights.packed import Pair, Tensors, random_tensors, write
from tests.weights.test_held import logits
from tests.weights.test_packed import both, load

KINDS: dict[str, Callable[[tuple[int, int]], Made]] = {
    "awq": lambda shape: awq(shape, 16),
    "awq gemv": lambda shape: awq_gemv(shape, 16),
    "gptq with groups in no order": lambda shape: gptq(shape, 16, shuffled=True),
    "gptq of 8 bits": lambda shape: gptq(shape, -1, 8, form="gptq_v2"),
    "auto-round": lambda shape: auto_round(gptq(shape, 8, form="gptq_v2"), "auto_round"),
    "pack-quantized": lambda shape: pack_quantized(shape, 8, symmetric=False),
}
# Held on the devices alike, so not compared once more
OTHERS: dict[str, Callable[[tuple[int, int]], Made]] = {
    "pack-quantized symmetric": lambda shape: pack_quantized(shape, None),
    "gptq": lambda shape: gptq(shape, 8),
    "gptq of 8 bits, symmetric": lambda shape: gptq(shape, 16, 8, centred=True),
    "pack-quantized of 8 bits": lambda shape: pack_quantized(shape, 16, 8),
}


def pair(case: str, kind: str) -> tuple[Pair, dict[str, Any]]:
    """The configuration of a golden with its projections in words, and the settings."""
    config, settings = CASES[case], {}
    plain = random_tensors(config)
    packed: Tensors = dict(plain)
    for name, value in plain.items():
        if value.ndim == 2 and "_proj" in name:
            made = (KINDS | OTHERS)[kind]((value.shape[0], value.shape[1]))
            plain[name], settings = made.weight, made.settings
            module = name.removesuffix(".weight")
            del packed[name]
            packed |= {f"{module}{leaf[1:]}": array for leaf, array in made.stored.items()}
    return Pair(config, plain, packed), settings


@pytest.mark.parametrize("kind", KINDS)
def test_words_give_the_parameters_of_their_values(tmp_path: Path, kind: str) -> None:
    made, settings = pair("llama-gqa", kind)
    packed, plain = both(tmp_path, made, settings)
    for own, other in zip(load(packed), load(plain), strict=True):
        np.testing.assert_array_equal(own, other, strict=True)


@pytest.mark.parametrize(
    ("leaf", "value", "message"),
    [
        ("qzeros", None, "missing .*up_proj.qzeros"),
        ("scales", np.ones((3, 48), np.float16), r"up_proj.scales has shape \[3, 48\], expected"),
        ("scales", np.ones((2, 48), np.int32), "up_proj.scales has dtype I32, which is not one of"),
    ],
    ids=["missing", "shape", "type"],
)
def test_what_is_wrong_with_words_is_said_before_they_are_read(
    tmp_path: Path, leaf: str, value: np.ndarray | None, message: str
) -> None:
    made, settings = pair("llama-gqa", "awq")
    name = f"model.layers.0.mlp.up_proj.{leaf}"
    if value is None:
        del made.packed[name]
    else:
        made.packed[name] = value
    packed, _ = both(tmp_path, made, settings)
    with pytest.raises(ConfigError, match=message):
        load(packed)


GPT2 = (".attn.c_attn.weight", ".attn.c_proj.weight", ".c_fc.weight", ".mlp.c_proj.weight")


@pytest.mark.parametrize("names", [GPT2, *((name,) for name in GPT2), GPT2[:1] + GPT2[2:]])
def test_matrices_of_gpt2_lie_as_those_of_others_where_they_are_packed(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    config, settings = CASES["gpt2-tied"], {}
    plain = random_tensors(config)
    packed: Tensors = dict(plain)
    for name in [n for n in plain if n.endswith(names)]:
        made = gptq(packed.pop(name).T.shape, 8)
        plain[name], settings = np.ascontiguousarray(made.weight.T), made.settings
        module = name.removesuffix(".weight")
        packed |= {f"{module}{leaf[1:]}": array for leaf, array in made.stored.items()}
    own, other = both(tmp_path, Pair(config, plain, packed), settings)
    for each, wanted in zip(load(own), load(other), strict=True):
        np.testing.assert_array_equal(each, wanted, strict=True)
    spec = models.read_spec(own)
    spec = replace(spec, formats=weights.weight_formats(own, spec, None))
    assert len(spec.formats) == len(names) * len(spec.layers)
    expected = logits(other, models.read_spec(other))
    np.testing.assert_allclose(logits(own, spec), expected, atol=1e-4)


def test_a_bias_of_zeros_that_the_model_lacks_is_left_out(tmp_path: Path) -> None:
    made, settings = pair("llama-gqa", "gptq")
    name = "model.layers.0.mlp.up_proj.bias"
    made.packed[name] = np.zeros(48, np.float16)
    packed, plain = both(tmp_path, made, settings)
    for own, other in zip(load(packed), load(plain), strict=True):
        np.testing.assert_array_equal(own, other, strict=True)
    made.packed[name] = np.full(48, 0.5, np.float16)
    packed, _ = both(tmp_path, made, settings)
    with pytest.raises(ConfigError, match=f"unexpected {name}"):
        load(packed)


@pytest.mark.parametrize("kind", ["auto-round", "awq", "gptq"])
def test_a_wish_for_the_checkpoints_own_method_is_no_contradiction(
    tmp_path: Path, kind: str
) -> None:
    made, settings = pair("llama-gqa", kind)
    path = write(tmp_path / "a", made.config | {"quantization_config": settings}, made.packed)
    spec = models.read_spec(path)
    assert weights.weight_formats(path, spec, kind) == weights.weight_formats(path, spec, None)
