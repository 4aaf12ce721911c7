"""GPT-NeoX and Pythia. Converters put all queries before all keys and all values."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxllm.gguf.architecture import Architecture
from jaxllm.gguf.config import base_config, turning_share
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.model import Model
from jaxllm.tensors import Deferred

_LAYER = "gpt_neox.layers.{}"
NAMES = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    "blk.{}.attn_norm": f"{_LAYER}.input_layernorm",
    "blk.{}.attn_qkv": f"{_LAYER}.attention.query_key_value",
    "blk.{}.attn_output": f"{_LAYER}.attention.dense",
    "blk.{}.ffn_norm": f"{_LAYER}.post_attention_layernorm",
    "blk.{}.ffn_up": f"{_LAYER}.mlp.dense_h_to_4h",
    "blk.{}.ffn_down": f"{_LAYER}.mlp.dense_4h_to_h",
}


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    metadata = model.metadata
    return base_config(
        model,
        "gpt_neox",
        layer_norm_eps=metadata.number("attention.layer_norm_epsilon"),
        rotary_pct=turning_share(metadata),
        attention_bias="blk.0.attn_qkv.bias" in model.tensors,
        use_parallel_residual=metadata.flag("use_parallel_residual"),
    )


def _by_head(tensor: Deferred, metadata: Metadata) -> Deferred:
    """A head's query, key and value behind each other."""
    heads = metadata.count("attention.head_count") or 1
    rows = np.arange(tensor.shape[0]).reshape(3, heads, -1)
    return tensor.take(rows.swapaxes(0, 1).reshape(-1), axis=0)


ARCHITECTURE = Architecture(config, NAMES, {"blk.{}.attn_qkv": _by_head})
