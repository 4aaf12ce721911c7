"""GTE: an encoder with norms over the sums, rotary positions and gated feed-forwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.models.config.encoder import attention, dense_head, encoder, encoder_spec
from jaxllm.models.config.read import Config, flag, number, positive
from jaxllm.models.config.rope import rope, rope_parameters
from jaxllm.models.config.spec import ModelSpec
from jaxllm.nn.blocks import ResidualNormBlock
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import EncoderEmbedding
from jaxllm.nn.linear import Init, Linear
from jaxllm.nn.mlp import GatedMLP
from jaxllm.nn.norm import LayerNorm, NoNorm
from jaxllm.nn.rules import Rows, Rule
from jaxllm.pooling import DenseMap

DEFAULTS: Config = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 8192,
    "type_vocab_size": 1,
}
ENCODES = True
THETA = 160_000.0
PREFIXES = {"new.": "gte."}
NAMES: Mapping[str, tuple[str, ...]] = {
    "embed": ("gte.embeddings.word_embeddings",),
    "embed.types": ("gte.embeddings.token_type_embeddings",),
    "embed.norm": ("gte.embeddings.LayerNorm",),
    "layers.{}.attention.qkv": tuple(f"gte.layers.{{}}.self_attn.{x}_proj" for x in "qkv"),
    "layers.{}.attention.out": ("gte.layers.{}.self_attn.o_proj",),
    "layers.{}.attention_norm": ("gte.layers.{}.post_attention_layernorm",),
    "layers.{}.mlp.gate_up": ("gte.layers.{}.mlp.gate_proj", "gte.layers.{}.mlp.up_proj"),
    "layers.{}.mlp.down": ("gte.layers.{}.mlp.down_proj",),
    "layers.{}.mlp_norm": ("gte.layers.{}.post_mlp_layernorm",),
}


def published_names(body: str) -> Mapping[str, tuple[str, ...]]:
    """The names that the makers gave to the same modules, which transformers writes, too."""
    layer = f"{body}.encoder.layer.{{}}"
    return {
        "embed": (f"{body}.embeddings.word_embeddings",),
        "embed.types": (f"{body}.embeddings.token_type_embeddings",),
        "embed.norm": (f"{body}.embeddings.LayerNorm",),
        "layers.{}.attention.qkv": (f"{layer}.attention.qkv_proj",),
        "layers.{}.attention.out": (f"{layer}.attention.o_proj",),
        "layers.{}.attention_norm": (f"{layer}.attn_ln",),
        "layers.{}.mlp.gate_up": (f"{layer}.mlp.up_gate_proj",),
        "layers.{}.mlp.down": (f"{layer}.mlp.down_proj",),
        "layers.{}.mlp_norm": (f"{layer}.mlp_ln",),
    }


def needless(body: str) -> tuple[str, ...]:
    """Tensors of heads for masked words and labels."""
    heads = (f"{body}.pooler.dense", "classifier", "lm_head.dense", "lm_head.decoder")
    norms = ("lm_head.norm", "lm_head.layer_norm")
    return tuple(f"{name}.{leaf}" for name in heads + norms for leaf in ("weight", "bias"))


OTHER_NAMES = (published_names("gte"),)
IGNORED = needless("gte")
REMOTE_CODE = ("modeling_hf_alibaba_nlp_gte",)


class UpGate(Linear):
    """Gate and up rows; a tensor that holds both has the up rows first."""

    def rules(self, *names: str) -> Iterator[Rule]:
        for rule in super().rules(*names):
            if len(names) > 1:
                yield rule
                continue
            gate, up = rule.pieces
            pieces = replace(gate, steps=up.steps), replace(up, steps=gate.steps)
            yield replace(rule, pieces=pieces)


def read(hf: Config) -> dict[str, Any]:
    """The configuration with its rotary base. Raises ConfigError."""
    settings = rope_parameters({"rope_theta": THETA} | dict(stretched(hf)))
    return {**hf, "rope_parameters": settings, "rope_scaling": None}


def stretched(hf: Config, base: float = THETA) -> Config:
    """The configuration with NTK scaling, which published files have, as a longer base and linear
    scaling, which it is; `base` is that of a file that names none.

    By a factor f the base grows f-fold, and every turn by f^(2 / width of a head). Raises
    ConfigError.
    """
    scaling = hf.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("type") != "ntk":
        return hf
    if scaling.get("mixed_b"):
        raise ConfigError(
            f"config.json: rope_scaling {scaling!r:.80} has mixed_b, which is not supported"
        )
    factor = number(scaling, "factor")
    width = positive(hf, "hidden_size") // positive(hf, "num_attention_heads")
    turns = {"rope_type": "linear", "factor": factor ** (2 / max(1, width))}
    theta = number(hf, "rope_theta", base) * factor
    return {**hf, "rope_theta": theta, "rope_scaling": turns}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    if flag(hf, "logn_attention_scale"):
        raise ConfigError("config.json: logn_attention_scale is not supported; it must be false")
    layers = positive(hf, "num_hidden_layers")
    length = positive(hf, "max_position_embeddings")
    return encoder_spec(hf, length=length, ropes=lambda dim: (rope(hf, dim),) * layers)


def classifier(hf: Config, labels: int) -> tuple[str, tuple[DenseMap, ...]]:
    """What is pooled for labels, and the maps behind it."""
    return "cls", dense_head(hf, labels, "gte.pooler.dense", "classifier")


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    width = spec.width
    inner = spec.inner_width
    config = spec.config

    def norm() -> LayerNorm:
        return LayerNorm(init, width, spec.norm_eps)

    def block() -> ResidualNormBlock:
        mlp = GatedMLP(init, width, inner, shards, spec.activation)
        rows = (Rows(1), Rows(1))
        axes = ("shard", None, None, "embed")
        mlp.gate_up = UpGate(init, (shards, 2, inner // shards), (width,), axes, parts=rows)
        mlp.down = Linear(init, (width,), (inner,), ("embed", "mlp"), bias=True)
        return ResidualNormBlock(
            attention_norm=norm(),
            attention=attention(spec, shards, init, bias=True),
            mlp_norm=norm(),
            mlp=mlp,
        )

    types = 0
    if config["type_vocab_size"] != 0:
        types = positive(config, "type_vocab_size")
    embed = EncoderEmbedding(init, spec.vocab_size, width, norm=norm(), types=types)
    return encoder(spec, embed, [block() for _ in spec.layers], NoNorm())
