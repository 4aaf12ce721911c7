"""The rule tables are total in both directions, and families refuse what they cannot build."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from safetensors import safe_open

from jaxllm import models
from jaxllm.config import ConfigError
from jaxllm.models.config.build import ignored, outline, read_name, rules, unused_prefixes
from tests.goldens.cases import CASES
from tests.goldens.golden import load_golden


def spec_of(hf: dict[str, Any]) -> models.ModelSpec:
    """The spec, with heads of their own width: parameters hold what is stored, and nothing else."""
    return models.make_spec(hf).with_heads_of(None)


def parameters(hf: dict[str, Any], shards: int) -> dict[str, tuple[int, ...]]:
    flat = nnx.to_flat_state(nnx.state(outline(spec_of(hf), shards, jnp.float32)))
    return {".".join(map(str, path)): variable.get_value().shape for path, variable in flat}


MIXTURES = [name for name, hf in CASES.items() if any("experts" in key for key in hf)]


@pytest.mark.parametrize(
    ("name", "shards"),
    [(name, shards) for name in CASES for shards in (1, 4 if name not in MIXTURES else 2)],
)
def test_every_tensor_is_used_once_and_every_parameter_made_once(name: str, shards: int) -> None:
    hf = models.read_config(load_golden(name).directory)
    spec = spec_of(hf)
    table = rules(spec, outline(spec, shards, jnp.float32))
    assert sorted(rule.parameter for rule in table) == sorted(parameters(hf, shards))
    stored: list[str] = []
    for file in load_golden(name).directory.glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            stored += opened.keys()
    common = read_name(spec, stored)
    stored = [name for name in map(common, stored) if name is not None]
    held = [rule.for_tensors(stored) for rule in table]
    used = [piece for rule in held for piece in rule.pieces]
    assert {piece.name for piece in used} == set(stored)
    for name in stored:  # parts of a tensor add up to all of it
        parts = [piece for piece in used if piece.name == name]
        assert sum(math.prod(p.view) for p in parts) == math.prod(parts[0].source)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["phimoe-longrope", "ernie4-5-moe-bias", "phi-head-norms"])
def test_a_head_has_a_bias_whether_it_is_the_embedding_or_not(name: str, tied: bool) -> None:
    hf = CASES[name] | {"tie_word_embeddings": tied}
    table = rules(spec_of(hf), outline(spec_of(hf), 1, jnp.float32))
    assert sorted(rule.parameter for rule in table) == sorted(parameters(hf, 1))
    assert "lm_head.bias" in {piece.name for rule in table for piece in rule.pieces}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_refuses_shards_that_cut_experts(name: str) -> None:
    with pytest.raises(ConfigError, match="not divide"):
        parameters(CASES[name], 64)


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("name", ["llama-mha-biases", "llama-mqa-tied-linear", "qwen3-gqa"])
def test_the_pieces_of_a_rule_fill_its_parameter_exactly(name: str, shards: int) -> None:
    spec, shapes = models.make_spec(CASES[name]), parameters(CASES[name], shards)
    for rule in rules(spec, outline(spec, shards, jnp.float32)):
        shape, at = shapes[rule.parameter], 0
        for piece in rule.pieces:
            assert piece.start == at
            assert piece.view[0] * piece.repeat == shape[0]
            assert piece.view[2:] == shape[2:]
            at += piece.view[1] if len(piece.view) > 1 else 0
        assert len(shape) == 1 or at == shape[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "xielu"}, "hidden_act 'xielu' is not supported \\(supported: gelu"),
        ({"hidden_act": ["silu"]}, "hidden_act \\['silu'\\]"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"intermediate_size": 50}, "width 50 does not divide over 4 tensor shards"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"max_window_layers": None}, "max_window_layers is None; it must be an integer"),
        ({"sliding_window": 0}, "sliding_window is 0; it must be a positive integer"),
        ({"layer_types": ["full_attention"]}, "layer_types must be 2 times"),
        (
            {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": False},
            "needs use_sliding_window",
        ),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parameters(CASES["qwen2-window-mha"] | changes, 4)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "mixtral-experts",
            {"num_experts_per_tok": 7},
            "cannot choose more experts than there are",
        ),
        ("mixtral-experts", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("qwen3-moe-sparse-step", {"mlp_only_layers": "1"}, "mlp_only_layers is '1'"),
        ("qwen3-moe-sparse-step", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("glm4-moe-groups", {"n_group": 3}, "8 experts must divide into groups of at least 2"),
        ("glm4-moe-groups", {"topk_group": 5}, "n_group is 4 and topk_group 5"),
        (
            "hunyuan-v1-moe",
            {"moe_topk": [2, 1]},
            "moe_topk is \\[2, 1\\]; layers must have the same",
        ),
        ("hunyuan-v1-moe", {"use_cla": True}, "layers that share keys are not supported"),
        ("kimi-k2", {"kv_lora_rank": 2**31 - 1}, "kv_lora_rank is 2147483647; at most 16384 is"),
        ("mixtral-experts", {"num_local_experts": 2**31 - 1}, "is 2147483647; at most 16384 are"),
        ("ernie4-5-moe", {"moe_num_shared_experts": -1}, "must be an integer of at least 0"),
    ],
)
def test_a_mixture_that_cannot_be_built_is_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parameters(CASES[name] | changes, 1)


def test_layers_that_predict_further_tokens_are_not_needed() -> None:
    spec = models.make_spec(CASES["glm4-moe-groups"] | {"num_nextn_predict_layers": 1})
    assert unused_prefixes(spec) == ("model.layers.2.",)
    assert unused_prefixes(models.make_spec(CASES["llama-gqa"])) == ()


def test_ernies_correction_is_one_row_under_either_name() -> None:
    spec = models.read_spec(load_golden("ernie4-5-moe").directory)
    table = rules(spec, outline(spec, 1, jnp.float32))
    rule = next(rule for rule in table if rule.parameter == "layers.1.mlp.router.correction")
    found = [(piece.name, piece.source) for (piece,) in rule.forms]
    name = "moe_statics.e_score_correction_bias"
    assert found == [
        (f"model.layers.1.mlp.{name}", (1, 6)),
        (f"model.layers.1.mlp.gate.{name}", (1, 6)),
    ]


def test_the_head_of_gpt_neox_has_two_names() -> None:
    spec = models.make_spec(CASES["gpt_neox-parallel"])
    rule = next(
        rule for rule in rules(spec, outline(spec, 1, jnp.float32)) if "head" in rule.parameter
    )
    assert [piece.name for (piece,) in rule.forms] == ["embed_out.weight", "lm_head.weight"]
    tied = models.make_spec(CASES["gpt_neox-parallel"] | {"tie_word_embeddings": True})
    embed = "gpt_neox.embed_in.weight"
    assert {each: ignored(tied)[f"{each}.weight"] for each in ("embed_out", "lm_head")} == {
        "embed_out": embed,
        "lm_head": embed,
    }
