"""StableLM: layer norms, a quarter of each head turns; the feed-forward follows attention or stands
beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxllm.models.config.read import Config, flag
from jaxllm.models.config.rope import check_even
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, Parts, transformer_spec
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.head_maps import HeadLayerNorm, NormedHeads
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import LayerNorm
from jaxllm.nn.rules import Ordered, Piece, Rule

REMOTE_CODE = ("modeling_stablelm",)
SPELLING = {"layer_norm_eps": "rms_norm_eps"}
DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.25,
}
NAMES = {
    **LLAMA_NAMES,
    "layers.{}.attention.head_map.q_norm": ("model.layers.{}.self_attn.q_layernorm.norms",),
    "layers.{}.attention.head_map.k_norm": ("model.layers.{}.self_attn.k_layernorm.norms",),
}


class OwnLayerNorm(HeadLayerNorm):
    """A layer norm of heads whose weights are a tensor for each head."""

    def rules(self, name: str) -> Iterator[Rule]:
        (rule,) = super().rules(name)
        rows, count, stored = rule.pieces[0].view
        dim = self.heads.dim
        order = self.heads.key_order
        steps = (Ordered((1, 1, dim), 2, order),) if order else ()
        pieces = (
            Piece(
                f"{name}.{row * count + head}.weight",
                (dim,),
                (1, 1, stored),
                head,
                self.repeat,
                row * self.repeat,
                steps,
            )
            for head in range(count)
            for row in range(rows)
        )
        yield replace(rule, pieces=tuple(pieces))


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    plain = transformer_spec(hf, partial=True)
    check_even(hf, plain.heads(1).dim)
    parallel = flag(hf, "use_parallel_residual")
    return replace(plain, carry_width=(2 if parallel else 1) * plain.width)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, LayerNorm)
    hf = spec.config
    bias = flag(hf, "use_qkv_bias")
    normed = flag(hf, "qk_layernorm")
    parallel = flag(hf, "use_parallel_residual")

    def block(layer: int) -> Block:
        norms = None
        if normed:
            norms = NormedHeads(init, parts.heads, spec.norm_eps, OwnLayerNorm)
        attention = parts.attention(layer, qkv_bias=bias, head_map=norms)
        if parallel:
            return parts.parallel_block(attention, parts.gated_mlp())
        return parts.block(attention, parts.gated_mlp())

    return parts.decoder(block)
