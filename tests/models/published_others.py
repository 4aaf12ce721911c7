"""Configs of published models of families that are less often served, with the parameters that
their makers count."""

from __future__ import annotations

from typing import Any

LLAMA = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}


def sized(
    base: dict[str, Any],
    model_type: str,
    layers: int,
    width: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    **others: Any,
) -> dict[str, Any]:
    """A config of a family that names its sizes as Llama does."""
    return (
        base
        | {
            "model_type": model_type,
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
        }
        | others
    )


OTHERS: dict[str, tuple[dict[str, Any], int]] = {
    "Phi-2": (
        sized(
            LLAMA,
            "phi",
            32,
            2560,
            10240,
            32,
            32,
            51200,
            hidden_act="gelu_new",
            layer_norm_eps=1e-5,
            max_position_embeddings=2048,
            partial_rotary_factor=0.4,
            qk_layernorm=False,
            eos_token_id=50256,
            bos_token_id=50256,
        ),
        2_779_683_840,
    ),
    "BLOOM-7B1": (
        {
            "model_type": "bloom",
            "n_layer": 30,
            "n_embed": 4096,
            "num_attention_heads": 32,
            "n_inner": None,
            "vocab_size": 250880,
            "seq_length": 2048,
            "layer_norm_epsilon": 1e-5,
            "apply_residual_connection_post_layernorm": False,
            "pretraining_tp": 1,
            "offset_alibi": 100,
        },
        7_069_016_064,
    ),
    "Apertus-8B": (
        sized(
            LLAMA,
            "apertus",
            32,
            4096,
            21504,
            32,
            8,
            131072,
            hidden_act="xielu",
            max_position_embeddings=65536,
            attention_bias=False,
            rope_theta=12000000,
            rope_scaling={
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        ),
        8_053_338_240,  # of which two a layer are constants
    ),
    "MPT-7B": (
        {
            "model_type": "mpt",
            "n_layers": 32,
            "d_model": 4096,
            "n_heads": 32,
            "expansion_ratio": 4,
            "vocab_size": 50432,
            "max_seq_len": 2048,
            "no_bias": True,
            "logit_scale": None,
            "attn_config": {
                "alibi": True,
                "alibi_bias_max": 8,
                "attn_type": "multihead_attention",
                "clip_qkv": None,
                "prefix_lm": False,
                "qk_ln": False,
                "softmax_scale": None,
            },
        },
        6_649_286_656,
    ),
    "Helium-1-preview-2B": (
        sized(
            LLAMA,
            "helium",
            24,
            2560,
            7040,
            20,
            20,
            48000,
            head_dim=128,
            max_position_embeddings=4096,
            rms_norm_eps=1e-8,
            rope_theta=100000.0,
            attention_bias=False,
            mlp_bias=False,
        ),
        2_172_643_840,
    ),
    "VaultGemma-1B": (
        sized(
            LLAMA,
            "vaultgemma",
            26,
            1152,
            6912,
            4,
            4,
            256000,
            head_dim=256,
            max_position_embeddings=1024,
            query_pre_attn_scalar=256,
            sliding_window=512,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            hidden_activation="gelu_pytorch_tanh",
            layer_types=["full_attention"] * 26,
            tie_word_embeddings=True,
        ),
        1_038_741_120,
    ),
    "DBRX": (
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "n_layers": 40,
            "n_heads": 48,
            "vocab_size": 100352,
            "max_seq_len": 32768,
            "tie_word_embeddings": False,
            "attn_config": {
                "clip_qkv": 8,
                "kv_n_heads": 8,
                "model_type": "",
                "rope_theta": 500000,
            },
            "ffn_config": {
                "ffn_hidden_size": 10752,
                "model_type": "",
                "moe_jitter_eps": 0.01,
                "moe_loss_weight": 0.05,
                "moe_num_experts": 16,
                "moe_top_k": 4,
            },
        },
        131_596_523_520,
    ),
}
