"""OPT: learned positions behind two spare entries, layer norms before or after each part, a
feed-forward without a gate; the table of tokens may be narrower than the model."""

from __future__ import annotations

from jaxllm.config import ConfigError
from jaxllm.models.config.read import Config, flag, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts, transformer_spec
from jaxllm.nn.blocks import Block, ResidualNormBlock
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init, Linear
from jaxllm.nn.norm import BareLayerNorm, LayerNorm, NoNorm

SPELLING = {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"}
DEFAULTS: Config = {
    "hidden_act": "relu",
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
}
LAYER = "model.decoder.layers.{}."
NAMES = {
    "embed": ("model.decoder.embed_tokens",),
    "embed.project": ("model.decoder.project_in",),
    "embed.positions": ("model.decoder.embed_positions",),
    "norm": ("model.decoder.final_layer_norm",),
    "project": ("model.decoder.project_out",),
    "head": ("lm_head",),
    "layers.{}.attention_norm": (LAYER + "self_attn_layer_norm",),
    "layers.{}.attention.qkv": tuple(f"{LAYER}self_attn.{part}_proj" for part in "qkv"),
    "layers.{}.attention.out": (LAYER + "self_attn.out_proj",),
    "layers.{}.mlp_norm": (LAYER + "final_layer_norm",),
    "layers.{}.mlp.up": (LAYER + "fc1",),
    "layers.{}.mlp.down": (LAYER + "fc2",),
}
IGNORED = ("model.decoder.version",)
SPARE = 2  # entries of the table before the first position's


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return transformer_spec({**hf, "rms_norm_eps": 1e-5}, still=True)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    hf = spec.config
    affine = flag(hf, "layer_norm_elementwise_affine")
    parts = Parts(spec, shards, init, LayerNorm if affine else BareLayerNorm)
    bias = flag(hf, "enable_bias")
    before = flag(hf, "do_layer_norm_before")
    if before:
        block_class = Block
    else:
        block_class = ResidualNormBlock
    into, back = _projections(spec, init)

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias)
        return parts.block(attention, parts.mlp(bias), block_class)

    if before and not flag(hf, "_remove_final_layer_norm"):
        norm = None
    else:
        norm = NoNorm()
    return parts.decoder(block, embed=parts.positioned(SPARE, into), norm=norm, project=back)


def _projections(spec: ModelSpec, init: Init) -> tuple[Linear | None, Linear | None]:
    """The maps from the width of the table of tokens to that of the model and back, None where both
    are one. Raises ConfigError where a model with them pools."""
    narrow = spec.config.get("word_embed_proj_dim")
    if narrow is None or positive(spec.config, "word_embed_proj_dim") == spec.width:
        return None, None
    if spec.pooling is not None:
        raise ConfigError(
            f"config.json: word_embed_proj_dim is {narrow} and hidden_size {spec.width}; "
            "models where they differ generate alone"
        )
    axes = "embed", "embed"
    into = Linear(init, (spec.width,), (narrow,), axes)
    return into, Linear(init, (narrow,), (spec.width,), axes)
