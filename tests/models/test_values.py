"""A wrong value of a key of config.json is one line that names the key, the value and the
remedy, whichever family reads it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxllm import models
from jaxllm.config import ConfigError
from jaxllm.models.config.build import outline
from tests.models.test_published_sizes import EXACT

WRONG: dict[str, tuple[Any, ...]] = {
    "size": (0, -8, True, "8", 8.0, math.nan, [8], {"size": 8}, 2**31),
    "switch": (0, 1, "true", "no", [], math.nan),
    "number": (0, -1.0, True, "1", math.nan, math.inf, [1.0], 1e18),
    "count": (-1, True, "1", 1.5, None, 2**31),
    "count or null": (-1, True, "1", 1.5, 2**31),
}
# Model → what its keys hold → keys
KEYS: dict[str, dict[str, list[str]]] = {
    "Llama-3.1-8B": {
        "size": [
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "vocab_size", "max_position_embeddings", "head_dim"),
        ],
        "switch": ["attention_bias", "mlp_bias", "tie_word_embeddings"],
        "number": ["rope_theta"],
    },
    "Mistral-7B-v0.1": {"size": ["sliding_window"]},
    "Mixtral-8x7B": {"size": ["num_local_experts", "num_experts_per_tok"]},
    "Qwen2.5-7B": {"switch": ["use_sliding_window"]},
    "Qwen3-8B": {"switch": ["attention_bias"]},
    "Qwen3-30B-A3B": {
        "size": ["num_experts", "moe_intermediate_size", "num_experts_per_tok"],
        "switch": ["norm_topk_prob", "use_sliding_window"],
    },
    "Gemma-2-9B": {
        "size": ["sliding_window"],
        "number": ["query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"],
        "switch": ["use_bidirectional_attention"],
    },
    "Gemma-3-1B": {
        "size": ["sliding_window_pattern"],
        "number": ["query_pre_attn_scalar"],
    },
    "GPT-2": {"switch": ["scale_attn_weights", "scale_attn_by_inverse_layer_idx"]},
    "OPT-350M": {
        "size": ["ffn_dim", "word_embed_proj_dim"],
        "switch": ["do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"],
    },
    "StarCoder": {"switch": ["multi_query", "scale_attn_weights"]},
    "Pythia-1.4B": {"switch": ["use_parallel_residual"]},
    "StarCoder2-3B": {"switch": ["use_bias"], "size": ["sliding_window"]},
    "StableLM-2-1.6B": {
        "switch": ["use_qkv_bias", "qk_layernorm", "use_parallel_residual"],
        "number": ["partial_rotary_factor"],
    },
    "Phi-2": {"switch": ["qk_layernorm"], "number": ["partial_rotary_factor"]},
    "BLOOM-7B1": {"switch": ["apply_residual_connection_post_layernorm"]},
    "Apertus-8B": {"switch": ["attention_bias"]},
    "MPT-7B": {"size": ["d_model", "n_layers", "expansion_ratio", "max_seq_len"]},
    "Falcon-7B": {"switch": ["alibi", "bias", "multi_query", "new_decoder_architecture"]},
    "SmolLM3-3B": {"size": ["no_rope_layer_interval"]},
    "gpt-oss-20b": {
        "size": ["sliding_window", "num_local_experts"],
        "number": ["swiglu_limit", "swiglu_alpha"],
    },
    "DeepSeek-V2-Lite": {
        "size": ["kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"],
        "number": ["routed_scaling_factor"],
    },
    "DeepSeek-V3": {
        "size": ["q_lora_rank", "n_routed_experts", "n_group", "topk_group"],
        "count": ["first_k_dense_replace"],
        "count or null": ["n_shared_experts"],
        "switch": ["norm_topk_prob", "rope_interleave"],
    },
}
CASES = [
    pytest.param(name, key, kind, id=f"{name}-{key}")
    for name, kinds in KEYS.items()
    for kind, keys in kinds.items()
    for key in keys
]


def refusal(hf: dict[str, Any]) -> str:
    """What is said of a configuration, by its spec or by the model without its arrays."""
    with pytest.raises(ConfigError) as error:
        outline(models.make_spec(hf), 1, jnp.bfloat16)
    return str(error.value)


def small(name: str) -> dict[str, Any]:
    """The configuration of a published model, of few layers where their number is a key alone."""
    hf = EXACT[name][0]
    types = {"layer_types": hf["layer_types"][:2]} if "layer_types" in hf else {}
    return hf | types | {"num_hidden_layers": 2, "first_k_dense_replace": 0}


@pytest.mark.parametrize(("name", "key", "kind"), CASES)
def test_a_wrong_value_is_refused_with_its_key_and_a_remedy(name: str, key: str, kind: str) -> None:
    for value in WRONG[kind]:
        said = refusal(small(name) | {key: value})
        assert said.startswith(f"config.json: {key} is {value!r}"), said
        assert "; it must be " in said or "; at most " in said
        assert len(said) < 250 and "\n" not in said


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Llama-3.1-8B", {"num_attention_heads": 4}, "4 attention heads are not a multiple of 8"),
        ("Llama-3.1-8B", {"num_key_value_heads": 64}, "32 attention heads are not a multiple of"),
        ("Llama-3.1-8B", {"head_dim": 127}, "head_dim is 127; rotary embedding needs a positive"),
        ("Llama-3.1-8B", {"hidden_act": "swooosh"}, "hidden_act 'swooosh' is not supported"),
        ("Llama-3.1-8B", {"rms_norm_eps": math.nan}, "rms_norm_eps is nan; it must be a number"),
        ("Llama-3.1-8B", {"rms_norm_eps": 1}, "rms_norm_eps is 1; it must be a number from 0 to 1"),
        ("Llama-3.1-8B", {"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05; it must be a number"),
        ("Llama-3.1-8B", {"partial_rotary_factor": 0.5}, "llama models turn whole heads"),
        ("Llama-3.1-8B", {"eos_token_id": -1}, "is not in the vocabulary of 128256 tokens"),
        ("Mixtral-8x7B", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but num_local_exp"),
        ("Qwen3-30B-A3B", {"num_experts_per_tok": 129}, "cannot choose more experts than there"),
        ("Qwen3-30B-A3B", {"mlp_only_layers": [0.0]}, "it must be a list of layers' numbers"),
        ("Gemma-2-9B", {"layer_types": ["full_attention"]}, "layer_types must be 2 times"),
        (
            "gpt-oss-20b",
            {"layer_types": ["full_attention", "local"]},
            "layer_types must be 2 times",
        ),
        ("SmolLM3-3B", {"no_rope_layers": [1, 2]}, "no_rope_layers must be 2 times 0 or 1"),
        ("StableLM-2-1.6B", {"partial_rotary_factor": 1.5}, "and no more than all"),
        ("StableLM-2-1.6B", {"partial_rotary_factor": 0.33}, "models turn an even number"),
        ("Pythia-1.4B", {"rotary_pct": 0.001}, "so 0 of 128 dimensions of a head turn"),
        ("Apertus-8B", {"hidden_act": "silu"}, "hidden_act is 'silu'; apertus models have 'xielu'"),
        ("MPT-7B", {"attn_config": {"alibi": False}}, "alibi is False; MPT runs where it is True"),
        ("MPT-7B", {"attn_config": {"qk_ln": True}}, "qk_ln is True; MPT runs where it is False"),
        ("MPT-7B", {"no_bias": False}, "no_bias is False; MPT runs where it is True"),
        ("MPT-7B", {"attn_config": 8}, "attn_config is 8; an object is expected"),
        ("MPT-7B", {"attn_config": {"clip_qkv": -1}}, "clip_qkv is -1; it must be a positive"),
        ("DBRX", {"moe_normalize_expert_weights": 2}, "it must be 1 or null"),
        ("DBRX", {"ffn_config": {"moe_top_k": 5}}, "moe_top_k is 5, but moe_num_experts is 4"),
        ("Falcon-7B", {"alibi": True}, "where each query head has a key head of its own"),
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "it must be 'greedy' or 'group_limited"),
        ("DeepSeek-V2-Lite", {"qk_rope_head_dim": 63}, "needs a positive even number"),
        ("DeepSeek-V3", {"n_group": 7}, "256 experts must divide into groups of at least 2"),
        ("DeepSeek-V3", {"topk_group": 9}, "n_group is 8 and topk_group 9"),
        ("DeepSeek-V3", {"n_group": 256, "topk_group": 8}, "divide into groups of at least 2"),
        ("DeepSeek-V3", {"num_experts_per_tok": 129}, "topk_group leaves 128 experts to choose"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "deepseek_v3 models have 'sigmoid'"),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "deepseek_v3 models have 1"),
    ],
)
def test_values_that_contradict_each_other_are_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    said = refusal(small(name) | changes)
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize("name", EXACT)
def test_sizes_that_a_family_cannot_guess_are_asked_for(name: str) -> None:
    hf = small(name)
    spelling = getattr(models.family(hf["model_type"]), "SPELLING", {})
    for key in hf:
        common = spelling.get(key, key)
        if common in ("hidden_size", "num_attention_heads", "vocab_size"):
            if common in models.family(hf["model_type"]).DEFAULTS:
                continue
            said = refusal({other: value for other, value in hf.items() if other != key})
            names = [own for own, other in spelling.items() if other == common] or [key]
            assert f"{names[0]} is None; it must be a positive integer" in said


def test_an_error_names_the_key_that_the_file_has() -> None:
    gpt2 = small("GPT-2")
    assert "config.json: n_layer is 0;" in refusal(gpt2 | {"n_layer": 0})
    falcon = small("Falcon-7B")
    assert "config.json: hidden_size is 0;" in refusal(falcon | {"hidden_size": 0})


@pytest.mark.parametrize("name", EXACT)
def test_keys_that_no_model_reads_change_nothing(name: str) -> None:
    hf = EXACT[name][0]
    extra = {"architectures": ["X"], "use_cache": True, "transformers_version": "4.0", "my_key": {}}
    first, second = models.make_spec(hf), models.make_spec(hf | extra)
    assert replace(first, config={}) == replace(second, config={})
