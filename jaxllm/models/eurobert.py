"""EuroBERT: Llama whose tokens see those behind them, too. Its checkpoints name code of their own,
which is not run."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.config import ConfigError
from jaxllm.models.config.encoder import encoder
from jaxllm.models.config.read import Config, flag, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import EncoderEmbedding
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import NoNorm
from jaxllm.pooling import LATE, DenseMap

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "classifier_pooling": "late",
}
ENCODES = True
NAMES = LLAMA_NAMES
REMOTE_CODE = ("modeling_eurobert",)
# Of heads for labels
IGNORED = tuple(f"{head}.{leaf}" for head in ("dense", "classifier") for leaf in ("weight", "bias"))
POOLS = {"bos": "cls", "mean": "mean", "late": LATE}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return replace(transformer_spec(hf), tied=True)


def classifier(hf: Config, labels: int) -> tuple[str, tuple[DenseMap, ...]]:
    """What is pooled for labels, and the maps behind it. Raises ConfigError."""
    width = positive(hf, "hidden_size")
    mode = hf.get("classifier_pooling")
    if mode not in list(POOLS):
        raise ConfigError(
            f"config.json: classifier_pooling is {mode!r:.80}; it must be bos, mean or late"
        )
    dense = DenseMap(name="dense", inputs=width, outputs=width, bias=True, activation="gelu")
    return POOLS[mode], (
        dense,
        DenseMap(name="classifier", inputs=width, outputs=labels, bias=True),
    )


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init)
    bias = flag(spec.config, "attention_bias")
    mlp_bias = flag(spec.config, "mlp_bias")

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias)
        return parts.block(attention, parts.gated_mlp(mlp_bias))

    embed = EncoderEmbedding(init, spec.vocab_size, spec.width, norm=NoNorm())
    return encoder(spec, embed, [block(layer) for layer in range(len(spec.layers))], parts.norm())
