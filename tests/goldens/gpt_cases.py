"""Cases of the first families after GPT-2, each with the keys of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 96}
_OPT: dict[str, Any] = {
    "model_type": "opt",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "max_position_embeddings": 192,
    "pad_token_id": 1,
    **_IDS,
}
_NEO: dict[str, Any] = {
    "model_type": "gpt_neo",
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 16,
    "max_position_embeddings": 192,
    **_IDS,
}
_GPTJ: dict[str, Any] = {
    "model_type": "gptj",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "rotary_dim": 4,
    "n_positions": 192,
    "tie_word_embeddings": False,
    **_IDS,
}
_BIGCODE: dict[str, Any] = {
    "model_type": "gpt_bigcode",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 192,
    **_IDS,
}
_CODEGEN: dict[str, Any] = {**_GPTJ, "model_type": "codegen"}

GPT_CASES: Mapping[str, dict[str, Any]] = {
    "opt-pre-norm": {**_OPT, "word_embed_proj_dim": 32, "activation_function": "relu"},
    # Norms over the sums, none at the end, and tokens of half the width
    "opt-post-norm-projected": {**_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    # Heads of odd width, norms without weights, no biases, wider tokens, a head of its own
    "opt-bare-norms": {
        **_OPT,
        "hidden_size": 20,
        "ffn_dim": 36,
        "word_embed_proj_dim": 24,
        "activation_function": "gelu",
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "tie_word_embeddings": False,
    },
    "gpt_neo-windows": _NEO,
    # Layers in another order than `attention_types` has them, heads of odd width
    "gpt_neo-odd-heads": {
        **_NEO,
        "hidden_size": 20,
        "intermediate_size": 36,
        "num_layers": 3,
        "attention_types": [[["global"], 1], [["local", "local"], 1]],
        "attention_layers": ["local", "global", "local"],
        "activation_function": "relu",
        "tie_word_embeddings": False,
    },
    "gptj-half": _GPTJ,
    # A share of a head that float64 rounds to less than the dimensions that turn
    "gptj-tied": {
        **_GPTJ,
        "n_embd": 88,
        "n_head": 2,
        "n_inner": 40,
        "rotary_dim": 30,
        "activation_function": "gelu",
        "tie_word_embeddings": True,
    },
    "gptj-whole": {**_GPTJ, "rotary_dim": 8, "vocab_size": 67},
    "codegen-half": _CODEGEN,
    # Blocks that end within a head
    "codegen-two-heads": {**_CODEGEN, "n_embd": 24, "n_head": 2, "tie_word_embeddings": True},
    "gpt_bigcode-one-key-head": _BIGCODE,
    # Queries, keys and values head by head, and heads of odd width
    "gpt_bigcode-heads": {
        **_BIGCODE,
        "n_embd": 20,
        "n_inner": 36,
        "multi_query": False,
        "scale_attn_weights": False,
        "activation_function": "gelu",
        "tie_word_embeddings": False,
    },
}
