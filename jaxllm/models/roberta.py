"""RoBERTa: BERT whose positions begin behind the padding token's id, and a head of its own."""

from __future__ import annotations

from jaxllm.config import ConfigError
from jaxllm.models import bert
from jaxllm.models.config.encoder import dense_head, encoder_spec
from jaxllm.models.config.read import Config, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.pooling import DenseMap

DEFAULTS: Config = {**bert.DEFAULTS, "pad_token_id": 1}
ENCODES = True
NAMES = bert.names("roberta")
# Of the embedding of positions, of pre-training's head, of a pooler and of labels' head
IGNORED = (
    "roberta.embeddings.position_ids",
    "lm_head.bias",
    *(
        f"{name}.{leaf}"
        for name in ("roberta.pooler.dense", "classifier.dense", "classifier.out_proj")
        for leaf in ("weight", "bias")
    ),
    *(
        f"lm_head.{name}.{leaf}"
        for name in ("dense", "layer_norm", "decoder")
        for leaf in ("weight", "bias")
    ),
)


def first_position(hf: Config) -> int:
    """The entry of the first position in its table."""
    pad = hf.get("pad_token_id")
    if type(pad) is not int or pad < 0:
        raise ConfigError(f"config.json: pad_token_id is {pad!r:.80}; it must be a token id")
    return pad + 1


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    length = positive(hf, "max_position_embeddings") - first_position(hf)
    if length < 1:
        raise ConfigError("config.json: max_position_embeddings leaves no position for a token")
    return encoder_spec(hf, length=length)


def classifier(hf: Config, labels: int) -> tuple[str, tuple[DenseMap, ...]]:
    """What is pooled for labels, and the maps behind it."""
    return "cls", dense_head(hf, labels, "classifier.dense", "classifier.out_proj")


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    return bert.build(spec, shards, init, first_position(spec.config))
