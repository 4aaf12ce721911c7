"""ChatGLM 2 and 3 and GLM-4 as they were first published, for code of their own: GLM with other
keys and names. That code is not run."""

from __future__ import annotations

from jaxllm.config import ConfigError
from jaxllm.models.config.read import Config, flag, number, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import LayerNorm, RMSNorm
from jaxllm.nn.rules import Layout

SPELLING = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "kv_channels": "head_dim",
    "padded_vocab_size": "vocab_size",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
}
DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "head_dim": 128,
    "multi_query_group_num": 1,
    "partial_rotary_factor": 0.5,
    "rope_ratio": 1.0,
    "rmsnorm": True,
    "post_layer_norm": True,
}
NAMES = {
    "embed": ("transformer.embedding.word_embeddings",),
    "norm": ("transformer.encoder.final_layernorm",),
    "head": ("transformer.output_layer",),
    **{
        f"layers.{{}}.{module}": (f"transformer.encoder.layers.{{}}.{name}",)
        for module, name in {
            "attention_norm": "input_layernorm",
            "attention.qkv": "self_attention.query_key_value",
            "attention.out": "self_attention.dense",
            "mlp_norm": "post_attention_layernorm",
            "mlp.gate_up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        }.items()
    },
}
IGNORED = ("transformer.rotary_pos_emb.inv_freq",)
REMOTE_CODE = ("modeling_chatglm",)
GENERATES = ("ChatGLMModel",)
FIRST = ("position_encoding_2d", "apply_residual_connection_post_layernorm")  # ChatGLM has these


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    if any(flag(hf, key) for key in FIRST) or not flag(hf, "post_layer_norm"):
        raise ConfigError(
            f"config.json: {' and '.join(FIRST)} must be false and post_layer_norm true; use "
            "ChatGLM 2 or later"
        )
    shares = flag(hf, "multi_query_attention")
    groups = positive(hf, "multi_query_group_num") if shares else None
    common = {"num_key_value_heads": groups, "rope_theta": 10000.0 * number(hf, "rope_ratio")}
    return transformer_spec({**hf, **common}, partial=True, paired=True)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    hf = spec.config
    parts = Parts(spec, shards, init, RMSNorm if flag(hf, "rmsnorm") else LayerNorm)
    bias = flag(hf, "add_bias_linear")
    layout = Layout.OUT_IN if flag(hf, "multi_query_attention") else Layout.GROUPED

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias or flag(hf, "add_qkv_bias"), out_bias=bias)
        attention.qkv.layout = layout
        return parts.block(attention, parts.gated_mlp(bias))

    return parts.decoder(block)
