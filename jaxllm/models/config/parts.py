"""What families that follow Llama's plan share: sizes from the configuration, and the parts around
their blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.models.config.kv_scales import kv_scale_names
from jaxllm.models.config.read import positive, read_heads
from jaxllm.models.config.rope import rope
from jaxllm.nn.decoder import Block, Decoder
from jaxllm.nn.heads import Heads
from jaxllm.nn.linear import Embedding, Init, Linear, vocab_axis
from jaxllm.nn.mlp import ACTIVATIONS
from jaxllm.nn.norm import RMSNorm


@dataclass(frozen=True)
class Sizes:
    """The numbers of a configuration, checked."""

    vocab: int
    width: int
    inner: int
    layers: int
    heads: Heads
    eps: float
    activation: str
    tied: bool

    @property
    def shards(self) -> int:
        return self.heads.shards


def sizes(hf: Mapping[str, Any], shards: int) -> Sizes:
    """Sizes of a complete configuration on `shards` tensor shards. Raises ConfigError when they
    cannot work."""
    inner = positive(hf, "intermediate_size")
    if inner % shards:
        raise ConfigError(
            f"intermediate_size {inner} does not divide over {shards} tensor shards; choose another tensor_parallel_size"
        )
    activation = hf.get("hidden_act")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: hidden_act {activation!r} is not supported (supported: {', '.join(sorted(ACTIVATIONS))})"
        )
    eps = hf.get("rms_norm_eps")
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ConfigError(f"config.json: rms_norm_eps is {eps!r}; it must be a number from 0 to 1")
    return Sizes(
        vocab=positive(hf, "vocab_size"),
        width=positive(hf, "hidden_size"),
        inner=inner,
        layers=positive(hf, "num_hidden_layers"),
        heads=read_heads(hf, shards),
        eps=float(eps),
        activation=activation,
        tied=bool(hf.get("tie_word_embeddings", False)),
    )


def decoder(
    hf: Mapping[str, Any], size: Sizes, init: Init, block: Callable[[int], Block]
) -> Decoder:
    """Embedding, `block(layer)` for every layer, norm and head."""
    head_axes = (vocab_axis(size.vocab, size.shards), "embed")
    return Decoder(
        embed=Embedding(init, size.vocab, size.width, size.shards),
        layers=[block(layer) for layer in range(size.layers)],
        norm=RMSNorm(init, size.width, size.eps),
        head=None if size.tied else Linear(init, (size.vocab,), (size.width,), head_axes),
        rope=rope(hf, size.heads.dim),
    )


def layer_windows(hf: Mapping[str, Any], layers: int) -> list[int | None]:
    """Sliding window of each layer where `layer_types`, or `use_sliding_window` with
    `max_window_layers`, decide it."""
    window = (
        positive(hf, "sliding_window")
        if hf.get("use_sliding_window") and hf.get("sliding_window") is not None
        else None
    )
    kinds = hf.get("layer_types")
    if kinds is None:
        first = hf.get("max_window_layers", layers)
        if window is not None and (not isinstance(first, int) or isinstance(first, bool)):
            raise ConfigError(f"config.json: max_window_layers is {first!r}; it must be an integer")
        return [
            window if window is not None and layer >= first else None for layer in range(layers)
        ]
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not set(kinds) <= {"full_attention", "sliding_attention"}
    ):
        raise ConfigError(
            f"config.json: layer_types must be {layers} times 'full_attention' or 'sliding_attention'"
        )
    if window is None and "sliding_attention" in kinds:
        raise ConfigError(
            "config.json: layer_types has sliding_attention, which needs use_sliding_window and sliding_window"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def unused(hf: Mapping[str, Any], size: Sizes) -> dict[str, str | None]:
    """Tensors that a checkpoint may hold and that no parameter needs: rotary tables of older
    checkpoints, which follow from the configuration; scales for 8 bits, where keys and values have
    more (queries always have); and the head of a tied model, which must equal the embedding."""
    buffers: dict[str, str | None] = {}
    for layer in range(size.layers):
        buffers |= dict.fromkeys(
            f"model.layers.{layer}.self_attn.{name}" for name in ("rotary_emb.inv_freq", "q_scale")
        )
        buffers |= dict.fromkeys(name for pair in kv_scale_names(layer) for name in pair)
    return buffers | ({"lm_head.weight": "model.embed_tokens.weight"} if size.tied else {})
