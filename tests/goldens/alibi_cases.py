"""Cases of families with ALiBi, each with the keys of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 96}

ALIBI: Mapping[str, dict[str, Any]] = {
    # Twelve heads: slopes of eight, and four between them
    "falcon-alibi": {
        "model_type": "falcon",
        **IDS,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "num_attention_heads": 12,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
        "alibi": True,
    },
    # And heads of odd width
    "bloom-alibi": {
        "model_type": "bloom",
        "n_embed": 36,
        "n_layer": 2,
        "n_head": 12,
        "seq_length": 256,
        **IDS,
    },
    "bloom-normed-stream": {
        "model_type": "bloom",
        "hidden_size": 32,
        "n_layer": 2,
        "num_attention_heads": 4,
        "layer_norm_epsilon": 1e-3,
        "apply_residual_connection_post_layernorm": True,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vocab_size": 67,
    },
    "mpt-clip": {
        "model_type": "mpt",
        "d_model": 36,
        "n_layers": 2,
        "n_heads": 12,
        "max_seq_len": 256,
        **IDS,
        "attn_config": {"clip_qkv": 0.75, "softmax_scale": 0.4},
    },
    "mpt-alibi": {
        "model_type": "mpt",
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 256,
        "layer_norm_epsilon": 1e-3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vocab_size": 68,
    },
}
