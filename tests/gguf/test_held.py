"""Blocks of every type stay numbers of few bits on the devices and compute what they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from jaxllm import weights
from jaxllm.gguf.architecture import checkpoint_tensors
from jaxllm.gguf.directory import model_directory
from jaxllm.gguf.model import open_model
from jaxllm.models import ModelSpec, read_spec
from jaxllm.quantisation import WeightFormat
from tests.gguf.converted import written
from tests.gguf.writer import (
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    Stored,
    plain,
    random_blocks,
)
from tests.goldens.cases import CASES
from tests.weights.packed import random_tensors, write
from tests.weights.test_held import logits

HELD = {
    Q8_0: WeightFormat("int8", 32, scales="float16"),
    Q4_0: WeightFormat("int4", 32),
    Q4_1: WeightFormat("int4", 32, form="offsets"),
    Q5_0: WeightFormat("int8", 32, scales="float16"),
    Q5_1: WeightFormat("int8", 32, form="offsets", scales="float16"),
    Q2_K: WeightFormat("int4", 16, form="offsets"),
    Q3_K: WeightFormat("int4", 16),
    Q4_K: WeightFormat("int4", 32, form="offsets"),
    Q5_K: WeightFormat("int8", 32, form="offsets", scales="float16"),
    Q6_K: WeightFormat("int8", 16, scales="float16"),
    IQ4_NL: WeightFormat("iq4", 32),
    IQ4_XS: WeightFormat("iq4", 32),
    MXFP4: WeightFormat("fp4", 32),
}
TABLE, HEAD = "token_embd.weight", "output.weight"
TIED = "llama-mqa-tied-linear"
WIDE = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 32}
WIDE |= {"shared_intermediate_size": 256}


def file(
    path: Path,
    case: str,
    architecture: str,
    number: Callable[[str], int],
    ends: Mapping[str, int] = MappingProxyType({}),
    **more: Any,
) -> tuple[Path, ModelSpec, Path]:
    """A directory of a GGUF file whose matrices of layers are random blocks of the types that
    their names give, and the table and the head of those of `ends`; its spec with formats; and a
    directory with the plain checkpoint. `more` are keys of config.json."""
    own = CASES[case] | {key: size for key, size in WIDE.items() if key in CASES[case]}
    config: dict[str, Any] = own | {"num_hidden_layers": 2, "eos_token_id": 1} | more

    def stored(name: str, tensor: np.ndarray) -> Stored:
        if name in ends:
            return random_blocks(ends[name], tensor.shape)
        if tensor.ndim < 2 or name.endswith(".bias") or "blk." not in name:
            return plain(tensor)
        if "gate_inp" in name or "norm" in name:
            return plain(tensor)
        return random_blocks(number(name), tensor.shape)

    made = written(config, random_tensors(config), architecture, path / "model.gguf", stored)
    directory, _ = model_directory(made, str(path))
    tensors = checkpoint_tensors(open_model(made))
    found = {name: np.ascontiguousarray(each) for name, each in tensors.items()}
    same = json.loads((directory / "config.json").read_text())
    same.pop("quantization_config")
    spec = read_spec(directory)
    formats = weights.weight_formats(directory, spec, None)
    return directory, replace(spec, formats=formats), write(path / "plain", same, found)


def check(packed: Path, spec: ModelSpec, plain_directory: Path, shards: int = 1) -> None:
    wanted = logits(plain_directory, read_spec(plain_directory))
    found = logits(packed, spec, shards)
    np.testing.assert_allclose(found, wanted, atol=2e-5 * max(1, float(np.abs(wanted).max())))


@pytest.mark.parametrize(
    "number",
    [
        Q5_K,
        IQ4_XS,
        MXFP4,
        *(
            pytest.param(number, marks=pytest.mark.slow)
            for number in HELD
            if number not in (Q5_K, IQ4_XS, MXFP4)
        ),
    ],
)
def test_matrices_of_every_type_stay_in_few_bits(number: int, tmp_path: Path) -> None:
    directory, spec, wanted = file(tmp_path, "qwen3-gqa", "qwen3", lambda name: number)
    assert set(spec.formats.values()) == {HELD[number]}
    assert len(spec.formats) == 7 * len(spec.layers)
    check(directory, spec, wanted)


@pytest.mark.parametrize(
    ("number", "case", "shards"),
    [
        (Q4_K, "llama-gqa", 1),
        (Q5_K, "llama-gqa", 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (Q4_0, "llama-gqa", 2),
                (MXFP4, "llama-gqa", 1),
                (IQ4_NL, "llama-gqa", 1),
                (Q8_0, "llama-gqa", 2),
                (Q5_K, TIED, 1),
                (Q4_K, TIED, 1),
            )
        ),
    ],
)
def test_a_table_stays_so_unless_it_is_a_head_whose_sums_are_rounded(
    number: int, case: str, shards: int, tmp_path: Path
) -> None:
    directory, spec, wanted = file(tmp_path, case, "llama", lambda name: Q8_0, {TABLE: number})
    assert spec.formats.get("model.embed_tokens") == (None if spec.tied else HELD[number])
    check(directory, spec, wanted, shards)


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_values_of_6_bits_lie_beside_queries_of_4(tmp_path: Path, shards: int) -> None:
    def number(name: str) -> int:
        return Q6_K if "attn_v" in name or "ffn_down" in name else Q4_K

    directory, spec, wanted = file(tmp_path, "llama-gqa", "llama", number)
    kinds = {name.rpartition(".")[2]: kind for name, kind in spec.formats.items()}
    assert len(spec.formats) == 7 * len(spec.layers)
    assert {name for name, kind in kinds.items() if kind == HELD[Q6_K]} == {"v_proj", "down_proj"}
    assert set(kinds.values()) == {HELD[Q6_K], HELD[Q4_K]}
    check(directory, spec, wanted, shards)


@pytest.mark.parametrize(
    ("case", "architecture", "number"),
    [
        ("qwen3-moe-normalised", "qwen3moe", Q4_K),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("gpt-oss-fused", "gpt-oss", MXFP4),
                ("gpt-oss-fused", "gpt-oss", Q8_0),
                ("gpt-oss-fused", "gpt-oss", Q5_1),
                ("mixtral-experts", "llama", Q5_K),
                ("mixtral-experts", "llama", Q6_K),
            )
        ),
    ],
)
def test_experts_stay_in_few_bits(
    case: str, architecture: str, number: int, tmp_path: Path
) -> None:
    directory, spec, wanted = file(
        tmp_path, case, architecture, lambda name: number if "_exps" in name else Q8_0
    )
    experts = {kind for name, kind in spec.formats.items() if ".experts." in name}
    assert experts == {HELD[number]}
    check(directory, spec, wanted)


def test_a_router_and_gates_of_experts_in_unlike_types_become_plain(tmp_path: Path) -> None:
    directory, spec, wanted = file(
        tmp_path,
        "gpt-oss-fused",
        "gpt-oss",
        lambda name: Q8_0 if "gate_exps" in name else MXFP4,
    )
    experts = {name for name in spec.formats if ".experts." in name}
    assert experts == {f"model.layers.{i}.mlp.experts.down_proj" for i in range(2)}
    check(directory, spec, wanted)


@pytest.mark.parametrize(
    ("case", "architecture", "maps", "more"),
    [
        ("gpt_neox-parallel", "gptneox", 4, {}),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("chatglm-groups", "chatglm", 4, {"kv_channels": 64, "ffn_hidden_size": 512}),
                ("stablelm-head-norms", "stablelm", 7, {}),
                ("nemotron-biases", "nemotron", 6, {}),
                ("olmo-clip", "olmo", 7, {}),
                ("gpt2-tied", "gpt2", 0, {"n_embd": 256}),
            )
        ),
    ],
)
def test_joint_maps_and_rows_in_another_order_stay_in_few_bits(
    case: str, architecture: str, maps: int, more: dict[str, Any], tmp_path: Path
) -> None:
    directory, spec, wanted = file(tmp_path, case, architecture, lambda name: Q4_K, **more)
    assert len(spec.formats) == maps * len(spec.layers)
    assert set(spec.formats.values()) <= {HELD[Q4_K]}
    check(directory, spec, wanted)


@pytest.mark.parametrize("up", [Q4_K, Q5_K], ids=["alike", "unlike"])
def test_a_gate_is_read_without_the_up_that_is_joined_to_it(up: int, tmp_path: Path) -> None:
    directory, spec, wanted = file(
        tmp_path,
        "granitemoeshared-multipliers",
        "granitemoe",
        lambda name: up if "ffn_up" in name else Q4_K,
    )
    check(directory, spec, wanted)
