"""What the configurations of the goldens share."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def case(model_type: str, **changes: Any) -> dict[str, Any]:
    """A configuration; a change to None removes the key, "null" stays as JSON null."""
    merged = {"model_type": model_type, **_BASE, **changes}
    return {
        key: (None if value == "null" else value)
        for key, value in merged.items()
        if value is not None
    }
