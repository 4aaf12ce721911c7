"""Configs of published models: the parameters that their rules read are as many as their makers
count, and windows lie where the papers put them."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import pytest

from jaxllm import models
from jaxllm.models.config.build import outline, rules
from tests.models.gpt_sizes import GPT_EXACT
from tests.models.published_others import LLAMA, OTHERS, sized

QWEN = LLAMA | {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False}


YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
    "rope_scaling": YARN,
    "rms_norm_eps": 1e-6,
}
GEMMA2 = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
# Parameters as counted in the published checkpoints; layers that predict further tokens apart
EXACT: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7B": (sized(LLAMA, "llama", 32, 4096, 11008, 32, 32, 32000), 6_738_415_616),
    "Llama-3.1-8B": (sized(LLAMA, "llama", 32, 4096, 14336, 32, 8, 128256), 8_030_261_248),
    "Llama-3.2-1B": (
        sized(LLAMA, "llama", 16, 2048, 8192, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (
        sized(LLAMA, "mistral", 32, 4096, 14336, 32, 8, 32000, sliding_window=4096),
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        sized(QWEN, "qwen2", 24, 896, 4864, 14, 2, 151936, tie_word_embeddings=True),
        494_032_768,
    ),
    "Qwen2.5-7B": (sized(QWEN, "qwen2", 28, 3584, 18944, 28, 4, 152064), 7_615_616_512),
    "Qwen3-0.6B": (
        sized(QWEN, "qwen3", 28, 1024, 3072, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "Qwen3-8B": (
        sized(QWEN, "qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
        8_190_735_360,
    ),
    "Mixtral-8x7B": (
        sized(
            LLAMA,
            "mixtral",
            32,
            4096,
            14336,
            32,
            8,
            32000,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=None,
        ),
        46_702_792_704,
    ),
    "Qwen3-30B-A3B": (
        sized(
            QWEN,
            "qwen3_moe",
            48,
            2048,
            6144,
            32,
            4,
            151936,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
        30_532_122_624,
    ),
    "Gemma-2-2B": (
        sized(LLAMA, "gemma2", 26, 2304, 9216, 8, 4, 256000, **GEMMA2),
        2_614_341_888,
    ),
    "Gemma-2-9B": (
        sized(LLAMA, "gemma2", 42, 3584, 14336, 16, 8, 256000, **GEMMA2),
        9_241_705_984,
    ),
    "Gemma-3-1B": (
        sized(
            LLAMA,
            "gemma3_text",
            26,
            1152,
            6912,
            4,
            1,
            262144,
            head_dim=256,
            query_pre_attn_scalar=256,
            sliding_window=512,
            sliding_window_pattern=6,
            rope_theta=1e6,
            rope_local_base_freq=1e4,
            hidden_activation="gelu_pytorch_tanh",
            tie_word_embeddings=True,
        ),
        999_885_952,
    ),
    "Gemma-7B": (
        sized(LLAMA, "gemma", 28, 3072, 24576, 16, 16, 256000, tie_word_embeddings=True),
        8_537_680_896,
    ),
    "OLMoE-1B-7B": (
        sized(LLAMA, "olmoe", 16, 2048, 1024, 16, 16, 50304, num_experts=64),
        6_919_161_856,
    ),
    "Phi-3.5-MoE": (
        sized(LLAMA, "phimoe", 32, 4096, 6400, 32, 8, 32064)
        | {"attention_bias": True, "lm_head_bias": True, "num_local_experts": 16},
        41_873_153_344,
    ),
    "Phi-3-mini": (
        sized(LLAMA, "phi3", 32, 3072, 8192, 32, 32, 32064, pad_token_id=32000),
        3_821_079_552,
    ),
    "Phi-4": (
        sized(LLAMA, "phi3", 40, 5120, 17920, 40, 10, 100352, pad_token_id=100349),
        14_659_507_200,
    ),
    "SmolLM3-3B": (
        sized(LLAMA, "smollm3", 36, 2048, 11008, 16, 4, 128256, tie_word_embeddings=True),
        3_075_098_624,
    ),
    "GPT-2": (
        {
            "model_type": "gpt2",
            "n_layer": 12,
            "n_embd": 768,
            "n_head": 12,
            "n_positions": 1024,
            "n_ctx": 1024,
            "vocab_size": 50257,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
        },
        124_439_808,
    ),
    "Pythia-1.4B": (
        {
            "model_type": "gpt_neox",
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 16,
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "rotary_pct": 0.25,
            "rotary_emb_base": 10000,
            "use_parallel_residual": True,
            "hidden_act": "gelu",
            "tie_word_embeddings": False,
        },
        1_414_647_808,
    ),
    "StarCoder2-3B": (
        {
            "model_type": "starcoder2",
            "num_hidden_layers": 30,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "vocab_size": 49152,
            "max_position_embeddings": 16384,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "sliding_window": 4096,
            "rope_theta": 999999.4420358813,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        3_030_371_328,
    ),
    "StableLM-2-1.6B": (
        {
            "model_type": "stablelm",
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 100352,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": True,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
        1_644_515_328,
    ),
    **OTHERS,
    "Falcon-7B": (
        {
            "model_type": "falcon",
            "num_hidden_layers": 32,
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "vocab_size": 65024,
            "layer_norm_epsilon": 1e-5,
            "multi_query": True,
            "parallel_attn": True,
            "new_decoder_architecture": False,
            "bias": False,
            "alibi": False,
            "tie_word_embeddings": True,
        },
        6_921_720_704,
    ),
    "DeepSeek-V2-Lite": (
        sized(
            LLAMA,
            "deepseek_v2",
            27,
            2048,
            10944,
            16,
            16,
            102400,
            **DEEPSEEK,
            moe_intermediate_size=1408,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            topk_method="greedy",
            norm_topk_prob=False,
            routed_scaling_factor=1.0,
            scoring_func="softmax",
        ),
        15_706_484_224,
    ),
    "gpt-oss-20b": (
        sized(
            LLAMA,
            "gpt_oss",
            24,
            2880,
            2880,
            64,
            8,
            201088,
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 12,
            swiglu_limit=7.0,
            attention_bias=True,
            rope_theta=150000.0,
            rope_scaling=YARN | {"factor": 32.0, "beta_slow": 1.0, "truncate": False},
        ),
        20_914_757_184,
    ),
    "DeepSeek-V3": (
        sized(
            LLAMA,
            "deepseek_v3",
            61,
            7168,
            18432,
            128,
            128,
            129280,
            **DEEPSEEK,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            first_k_dense_replace=3,
            q_lora_rank=1536,
            n_group=8,
            topk_group=4,
            topk_method="noaux_tc",
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            scoring_func="sigmoid",
        ),
        671_026_419_200,
    ),
    **GPT_EXACT,
}


def counted(hf: dict[str, Any]) -> int:
    """Numbers in all checkpoint tensors that the model reads."""
    spec = models.make_spec(hf)
    pieces = (p for rule in rules(spec, outline(spec, 1, jnp.bfloat16)) for p in rule.pieces)
    return sum({piece.name: math.prod(piece.source) for piece in pieces}.values())


@pytest.mark.parametrize("name", EXACT)
def test_a_published_model_has_the_parameters_that_it_is_known_for(name: str) -> None:
    hf, parameters = EXACT[name]
    assert counted(hf) == parameters


def test_one_wrong_size_is_seen() -> None:
    hf, parameters = EXACT["Llama-3.1-8B"]
    assert counted(hf | {"num_key_value_heads": 4}) != parameters
    assert counted(hf | {"intermediate_size": 14337}) != parameters


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("Mistral-7B-v0.1", {4096: 32}),
        ("Gemma-2-9B", {4096: 21, None: 21}),
        ("Gemma-3-1B", {512: 22, None: 4}),
        ("Llama-3.1-8B", {None: 32}),
        ("StarCoder2-3B", {4096: 30}),
        ("GPT-Neo-125M", {256: 6, None: 6}),
    ],
)
def test_windows_lie_where_a_models_config_puts_them(
    name: str, windows: dict[int | None, int]
) -> None:
    spec = models.make_spec(EXACT[name][0])
    found = [layer.window for layer in spec.layers]
    assert {window: found.count(window) for window in set(found)} == windows
