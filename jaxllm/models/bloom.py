"""BLOOM: ALiBi, a norm behind the embedding, layer norms and biases everywhere. Queries, keys and
values are one tensor, head by head."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.models.config.alibi import with_alibi
from jaxllm.models.config.read import Config, flag, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import Parts, transformer_spec
from jaxllm.nn.blocks import Block, Carry
from jaxllm.nn.contexts.protocol import AttentionContext, RowContext
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import NormedEmbedding
from jaxllm.nn.head_maps import BiasedKeys
from jaxllm.nn.linear import Init
from jaxllm.nn.norm import LayerNorm
from jaxllm.nn.rope import Rotation
from jaxllm.nn.rules import Layout

SPELLING = {
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "layer_norm_epsilon": "rms_norm_eps",
    "seq_length": "max_position_embeddings",
}
DEFAULTS: Config = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
LENGTH = 2048  # of the first training, where the file does not say
NAMES = {
    "embed": ("transformer.word_embeddings",),
    "embed.norm": ("transformer.word_embeddings_layernorm",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
    "layers.{}.attention.qkv": ("transformer.h.{}.self_attention.query_key_value",),
    "layers.{}.attention.out": ("transformer.h.{}.self_attention.dense",),
    "layers.{}.attention_norm": ("transformer.h.{}.input_layernorm",),
    "layers.{}.mlp_norm": ("transformer.h.{}.post_attention_layernorm",),
    "layers.{}.mlp.up": ("transformer.h.{}.mlp.dense_h_to_4h",),
    "layers.{}.mlp.down": ("transformer.h.{}.mlp.dense_4h_to_h",),
}
TOKEN_HEAD = "classifier"


class NormedStreamBlock(Block):
    """A block whose norms are the residual stream: y + attention(y) of y = norm(x), then the same
    of the feed-forward."""

    def attend(
        self, layer: int, carry: Carry, rotation: Rotation, context: AttentionContext
    ) -> Carry:
        _, normed_TD = carry.normed(self.attention_norm, context)
        return Carry(normed_TD, self.attention(layer, normed_TD, rotation, context))

    def feed_forward(self, carry: Carry, context: RowContext) -> Carry:
        assert self.mlp_norm is not None
        _, normed_TD = carry.normed(self.mlp_norm, context)
        return Carry(normed_TD, self.mlp(normed_TD, context))


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    if hf.get("max_position_embeddings") is None:
        hf = {**hf, "max_position_embeddings": LENGTH}
    fixed = {"num_key_value_heads": None, "head_dim": None, "hidden_act": "gelu_pytorch_tanh"}
    inner = {"intermediate_size": 4 * positive(hf, "hidden_size")}
    plain = transformer_spec({**hf, **fixed, **inner}, still=True)
    return replace(with_alibi(plain, scale=plain.heads(1).dim ** -0.5), config=hf)


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    parts = Parts(spec, shards, init, LayerNorm)
    normed = flag(spec.config, "apply_residual_connection_post_layernorm")
    biased = BiasedKeys(parts.heads.dim)

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=True, out_bias=True, head_map=biased)
        attention.qkv.layout = Layout.GROUPED
        return parts.block(attention, parts.mlp(), NormedStreamBlock if normed else Block)

    axis = parts.table_axis
    norm = parts.norm()
    return parts.decoder(
        block, embed=NormedEmbedding(init, spec.vocab_size, spec.width, axis, norm)
    )
