"""GPT-2, whose matrices lie as those of other models here, and become plain numbers."""

from __future__ import annotations

from typing import Any

from jaxllm.gguf.architecture import Architecture
from jaxllm.gguf.config import base_config
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.model import Model
from jaxllm.tensors import Deferred

_LAYER = "transformer.h.{}"
NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{}.attn_norm": f"{_LAYER}.ln_1",
    "blk.{}.attn_qkv": f"{_LAYER}.attn.c_attn",
    "blk.{}.attn_output": f"{_LAYER}.attn.c_proj",
    "blk.{}.ffn_norm": f"{_LAYER}.ln_2",
    "blk.{}.ffn_up": f"{_LAYER}.mlp.c_fc",
    "blk.{}.ffn_down": f"{_LAYER}.mlp.c_proj",
}
MATRICES = tuple(
    f"blk.{{}}.{name}.weight" for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
)


def config(model: Model) -> dict[str, Any]:
    """The configuration."""
    epsilon = model.metadata.number("attention.layer_norm_epsilon")
    return base_config(model, "gpt2", layer_norm_epsilon=epsilon)


def _turned(tensor: Deferred, metadata: Metadata) -> Deferred:
    return tensor.swapaxes(0, 1)


ARCHITECTURE = Architecture(config, NAMES, dict.fromkeys(MATRICES, _turned), plain=MATRICES)
