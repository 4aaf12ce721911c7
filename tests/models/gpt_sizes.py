"""Configs of published models of the first families after GPT-2, with their numbers of
parameters."""

from __future__ import annotations

from typing import Any

_OPT: dict[str, Any] = {
    "model_type": "opt",
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "word_embed_proj_dim": 768,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "do_layer_norm_before": True,
}

GPT_EXACT: dict[str, tuple[dict[str, Any], int]] = {
    "OPT-125M": (_OPT, 125_239_296),
    "OPT-350M": (
        _OPT
        | {
            "num_hidden_layers": 24,
            "hidden_size": 1024,
            "ffn_dim": 4096,
            "num_attention_heads": 16,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
        331_196_416,
    ),
    "GPT-Neo-125M": (
        {
            "model_type": "gpt_neo",
            "num_layers": 12,
            "hidden_size": 768,
            "num_heads": 12,
            "intermediate_size": None,
            "attention_types": [[["global", "local"], 6]],
            "attention_layers": ["global", "local"] * 6,
            "window_size": 256,
            "vocab_size": 50257,
            "max_position_embeddings": 2048,
            "activation_function": "gelu_new",
        },
        125_198_592,
    ),
    "GPT-J-6B": (
        {
            "model_type": "gptj",
            "n_layer": 28,
            "n_embd": 4096,
            "n_head": 16,
            "n_inner": None,
            "rotary": True,
            "rotary_dim": 64,
            "n_positions": 2048,
            "vocab_size": 50400,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
        },
        6_050_882_784,
    ),
    "CodeGen-350M": (
        {
            "model_type": "codegen",
            "n_layer": 20,
            "n_embd": 1024,
            "n_head": 16,
            "n_inner": None,
            "n_ctx": 2048,
            "n_positions": 2048,
            "rotary_dim": 32,
            "vocab_size": 51200,
            "activation_function": "gelu_new",
            "tie_word_embeddings": False,
        },
        356_712_448,
    ),
    "StarCoder": (
        {
            "model_type": "gpt_bigcode",
            "n_layer": 40,
            "n_embd": 6144,
            "n_head": 48,
            "n_inner": 24576,
            "n_positions": 8192,
            "vocab_size": 49152,
            "activation_function": "gelu",
            "multi_query": True,
            "scale_attn_weights": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        15_517_456_384,
    ),
}
