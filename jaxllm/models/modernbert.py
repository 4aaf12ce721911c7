"""ModernBERT: an encoder with rotary positions, pre-norms without biases, gated feed-forwards, and
layers that see a window on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.models.config.encoder import attention, encoder, encoder_spec
from jaxllm.models.config.read import Config, flag, number, positive
from jaxllm.models.config.rope import layer_ropes
from jaxllm.models.config.spec import ModelSpec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import EncoderEmbedding
from jaxllm.nn.linear import Init
from jaxllm.nn.mlp import GatedMLP
from jaxllm.nn.norm import LayerNorm, NoNorm
from jaxllm.pooling import DenseMap

DEFAULTS: Config = {
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "local_attention": 128,
    "classifier_pooling": "cls",
    "classifier_activation": "gelu",
}
ENCODES = True
THETAS = {"full_attention": ("global", 160_000.0), "sliding_attention": ("local", 10_000.0)}
NAMES: Mapping[str, tuple[str, ...]] = {
    "embed": ("model.embeddings.tok_embeddings",),
    "embed.norm": ("model.embeddings.norm",),
    "norm": ("model.final_norm",),
    "layers.{}.attention.qkv": ("model.layers.{}.attn.Wqkv",),
    "layers.{}.attention.out": ("model.layers.{}.attn.Wo",),
    "layers.{}.attention_norm": ("model.layers.{}.attn_norm",),
    "layers.{}.mlp.gate_up": ("model.layers.{}.mlp.Wi",),
    "layers.{}.mlp.down": ("model.layers.{}.mlp.Wo",),
    "layers.{}.mlp_norm": ("model.layers.{}.mlp_norm",),
}
# Of heads for masked words and labels
IGNORED = (
    *(f"{name}.{leaf}" for name in ("head.dense", "head.norm") for leaf in ("weight", "bias")),
    *(f"{name}.{leaf}" for name in ("decoder", "classifier") for leaf in ("weight", "bias")),
)


def read(hf: Config) -> dict[str, Any]:
    """The configuration with the rotary settings of each type of layer, which older files have
    beside each other."""
    rotary = hf.get("rope_parameters")
    if isinstance(rotary, dict):
        settings = rotary
    else:
        settings = {}
    nested = {}
    for layer_type, (name, theta) in THETAS.items():
        listed = settings.get(layer_type) or {}
        if not isinstance(listed, dict):
            raise ConfigError(f"config.json: rope_parameters has {listed!r:.80} for {layer_type}")
        usual = {"rope_type": "default", "rope_theta": number(hf, f"{name}_rope_theta", theta)}
        nested[layer_type] = usual | listed
    return {"global_attn_every_n_layers": 3, **hf, "rope_parameters": nested}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    types = layer_types(hf)
    return encoder_spec(
        hf,
        length=positive(hf, "max_position_embeddings"),
        ropes=lambda dim: layer_ropes(hf, dim, dim, types),
        eps="norm_eps",
        activation="hidden_activation",
    )


def layer_types(hf: Config) -> list[str]:
    """Which layers see everything: as listed, or every third."""
    layers = positive(hf, "num_hidden_layers")
    every = positive(hf, "global_attn_every_n_layers")
    usual = ["sliding_attention" if layer % every else "full_attention" for layer in range(layers)]
    if hf.get("layer_types") is None:
        types = usual
    else:
        types = hf["layer_types"]
    legal = isinstance(types, list) and len(types) == layers
    if not legal or any(name not in list(THETAS) for name in types):
        raise ConfigError(
            f"config.json: layer_types must be {layers} times 'full_attention' or "
            "'sliding_attention'"
        )
    return types


def classifier(hf: Config, labels: int) -> tuple[str, tuple[DenseMap, ...]]:
    """What is pooled for labels, and the maps behind it."""
    width = positive(hf, "hidden_size")
    mode = hf.get("classifier_pooling")
    if mode not in ("cls", "mean") or hf.get("classifier_activation") != "gelu":
        raise ConfigError(
            "config.json: classifier_pooling must be cls or mean, and classifier_activation gelu"
        )
    dense = DenseMap(
        name="head.dense",
        inputs=width,
        outputs=width,
        bias=flag(hf, "classifier_bias"),
        activation="gelu",
        norm="head.norm",
        norm_eps=number(hf, "norm_eps"),
        norm_bias=flag(hf, "norm_bias"),
    )
    return mode, (dense, DenseMap(name="classifier", inputs=width, outputs=labels, bias=True))


def token_classifier(hf: Config, labels: int) -> tuple[DenseMap, ...]:
    """The maps to labels of every token."""
    return classifier(hf, labels)[1]


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    width = spec.width
    config = spec.config
    types = layer_types(config)
    reach = positive(config, "local_attention") // 2
    bias = flag(config, "attention_bias")
    mlp_bias = flag(config, "mlp_bias")

    def norm() -> LayerNorm:
        return LayerNorm(init, width, spec.norm_eps, flag(config, "norm_bias"))

    def block(layer: int) -> Block:
        window = None
        if types[layer] == "sliding_attention":
            window = reach
        return Block(
            attention_norm=norm() if layer else NoNorm(),
            attention=attention(spec, shards, init, bias=bias, window=window),
            mlp_norm=norm(),
            mlp=GatedMLP(init, width, spec.inner_width, shards, spec.activation, mlp_bias),
        )

    embed = EncoderEmbedding(init, spec.vocab_size, width, norm=norm())
    return encoder(spec, embed, [block(layer) for layer in range(len(spec.layers))], norm())
