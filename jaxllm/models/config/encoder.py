"""What encoders share: the spec of their configuration, and the parts of BERT's plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxllm.cache.layer import PagedKV
from jaxllm.config import ConfigError
from jaxllm.models.config.read import Config, eos_token_ids, number, positive, stored_dtype
from jaxllm.models.config.spec import ModelSpec
from jaxllm.nn.attention import Attention, Scoring
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import EncoderEmbedding
from jaxllm.nn.linear import Init
from jaxllm.nn.mlp import ACTIVATIONS
from jaxllm.nn.norm import Norm
from jaxllm.nn.rope import NoRope, Rope
from jaxllm.pooling import DenseMap


def encoder_spec(
    hf: Config,
    *,
    length: int,
    ropes: Callable[[int], tuple[Rope, ...]] | None = None,
    eps: str = "layer_norm_eps",
    activation: str = "hidden_act",
) -> ModelSpec:
    """The spec of a complete configuration.

    Args:
        length: tokens that the model is made for.
        ropes: the rotary embedding of each layer, from the width of a head; by default none.
        eps, activation: the family's names of these keys.

    Raises ConfigError when a value is missing or cannot work.
    """
    query = positive(hf, "num_attention_heads")
    width = positive(hf, "hidden_size")
    layers = positive(hf, "num_hidden_layers")
    dim = width // query
    if width % query or dim % 2:
        raise ConfigError(
            f"config.json: hidden_size {width} does not divide into {query} heads of an even width"
        )
    _check_choices(hf, activation)
    if ropes is None:
        layer_ropes: tuple[Rope, ...] = (NoRope(dim // 2),) * layers
    else:
        layer_ropes = ropes(dim)
    return ModelSpec(
        model_type=hf["model_type"],
        vocab_size=positive(hf, "vocab_size"),
        width=width,
        inner_width=positive(hf, "intermediate_size"),
        query_heads=query,
        layers=tuple(PagedKV(query, dim, dim) for _ in range(layers)),
        context_length=length,
        shared_length=None,
        eos_token_ids=tuple(sorted(eos_token_ids(hf))),
        stored_dtype=stored_dtype(hf),
        kv_cache_dtype="auto",
        tied=True,
        norm_eps=number(hf, eps),
        activation=hf[activation],
        ropes=layer_ropes,
        carry_width=width,
        served_length=length,
        config=hf,
    )


def _check_choices(hf: Config, activation: str) -> None:
    """Raise ConfigError when the activation or the positions are of a kind that is not known."""
    if not isinstance(hf.get(activation), str) or hf[activation] not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: {activation} {hf.get(activation)!r:.80} is not supported "
            f"(supported: {', '.join(sorted(ACTIVATIONS))})"
        )
    if hf.get("position_embedding_type", "absolute") not in ("absolute", "rope"):
        raise ConfigError(
            f"config.json: position_embedding_type {hf['position_embedding_type']!r:.80} is not "
            "supported; it must be absolute"
        )


def attention(
    spec: ModelSpec, shards: int, init: Init, *, bias: bool, window: int | None = None
) -> Attention:
    """The attention of one layer, to tokens at most `window` away."""
    return Attention(
        init,
        spec.heads(shards),
        spec.width,
        qkv_bias=bias,
        out_bias=bias,
        scoring=Scoring(window=window),
    )


def encoder(
    spec: ModelSpec, embed: EncoderEmbedding, layers: Sequence[Block], norm: Norm
) -> Decoder:
    """The model, whose hidden states are what it is for."""
    return Decoder(embed=embed, layers=layers, norm=norm, head=None, ropes=spec.ropes)


def dense_head(hf: Config, labels: int, dense: str, out: str) -> tuple[DenseMap, ...]:
    """A classifier of BERT's kind: tanh(dense(x)), then one number a label."""
    width = positive(hf, "hidden_size")
    return (
        DenseMap(name=dense, inputs=width, outputs=width, bias=True, activation="tanh"),
        DenseMap(name=out, inputs=width, outputs=labels, bias=True),
    )
