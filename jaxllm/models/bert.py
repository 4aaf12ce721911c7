"""BERT: an encoder with learned positions, types of text, and norms over the sums."""

from __future__ import annotations

from collections.abc import Mapping

from jaxllm.models.config.encoder import attention, dense_head, encoder, encoder_spec
from jaxllm.models.config.read import Config, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.nn.blocks import ResidualNormBlock
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import EncoderEmbedding
from jaxllm.nn.linear import Init
from jaxllm.nn.mlp import MLP, check_inner
from jaxllm.nn.norm import LayerNorm, NoNorm
from jaxllm.pooling import DenseMap

DEFAULTS: Config = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
ENCODES = True


def names(prefix: str) -> Mapping[str, tuple[str, ...]]:
    """The tensors of a model whose body has this name."""
    layer = f"{prefix}.encoder.layer.{{}}"
    embeddings = f"{prefix}.embeddings"
    return {
        "embed": (f"{embeddings}.word_embeddings",),
        "embed.positions": (f"{embeddings}.position_embeddings",),
        "embed.types": (f"{embeddings}.token_type_embeddings",),
        "embed.norm": (f"{embeddings}.LayerNorm",),
        "layers.{}.attention.qkv": (
            f"{layer}.attention.self.query",
            f"{layer}.attention.self.key",
            f"{layer}.attention.self.value",
        ),
        "layers.{}.attention.out": (f"{layer}.attention.output.dense",),
        "layers.{}.attention_norm": (f"{layer}.attention.output.LayerNorm",),
        "layers.{}.mlp.up": (f"{layer}.intermediate.dense",),
        "layers.{}.mlp.down": (f"{layer}.output.dense",),
        "layers.{}.mlp_norm": (f"{layer}.output.LayerNorm",),
    }


NAMES = names("bert")
# Of the embedding of positions, of pre-training's heads, and of a pooler that labels alone read
IGNORED = (
    "bert.embeddings.position_ids",
    *(f"bert.pooler.dense.{leaf}" for leaf in ("weight", "bias")),
    *(f"classifier.{leaf}" for leaf in ("weight", "bias")),
    *(f"cls.predictions.transform.dense.{leaf}" for leaf in ("weight", "bias")),
    *(f"cls.predictions.transform.LayerNorm.{leaf}" for leaf in ("weight", "bias")),
    *(f"cls.predictions.decoder.{leaf}" for leaf in ("weight", "bias")),
    "cls.predictions.bias",
    *(f"cls.seq_relationship.{leaf}" for leaf in ("weight", "bias")),
)


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return encoder_spec(hf, length=positive(hf, "max_position_embeddings"))


def classifier(hf: Config, labels: int) -> tuple[str, tuple[DenseMap, ...]]:
    """What is pooled for labels, and the maps behind it."""
    return "cls", dense_head(hf, labels, "bert.pooler.dense", "classifier")


def build(spec: ModelSpec, shards: int, init: Init, first: int = 0) -> Decoder:
    """The model with fresh parameters; `first` is the first position's entry of its table. Raises
    ConfigError."""
    width = spec.width
    config = spec.config
    check_inner(spec.inner_width, shards)

    def norm() -> LayerNorm:
        return LayerNorm(init, width, spec.norm_eps)

    def block() -> ResidualNormBlock:
        return ResidualNormBlock(
            attention_norm=norm(),
            attention=attention(spec, shards, init, bias=True),
            mlp_norm=norm(),
            mlp=MLP(init, width, spec.inner_width, spec.activation, bias=True),
        )

    embed = EncoderEmbedding(
        init,
        spec.vocab_size,
        width,
        norm=norm(),
        positions=positive(config, "max_position_embeddings"),
        first=first,
        types=positive(config, "type_vocab_size"),
    )
    return encoder(spec, embed, [block() for _ in spec.layers], NoNorm())
