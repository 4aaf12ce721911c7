"""InternLM 3: Llama under keys of its own. Its checkpoints name code of their own, which is not
run."""

from __future__ import annotations

from jaxllm.config import ConfigError
from jaxllm.models import llama
from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import transformer_spec

SPELLING = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
NAMES = llama.NAMES
build = llama.build
REMOTE_CODE = ("modeling_internlm3",)


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    if flag(hf, "attention_bias") != flag(hf, "mlp_bias"):
        raise ConfigError(
            "config.json: attention_bias and mlp_bias differ; InternLM 3 has both or none"
        )
    return transformer_spec(hf)
