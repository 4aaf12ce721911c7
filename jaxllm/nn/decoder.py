"""A decoder-only transformer made of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.nn.attention import AttentionContext, RowContext
from jaxllm.nn.linear import Embedding, Linear, contract
from jaxllm.nn.norm import RMSNorm
from jaxllm.nn.rope import Rope, Rotation
from jaxllm.nn.rules import Rule


class Block(nnx.Module):
    """Pre-norm transformer block: attention, then feed-forward.

    The norm that follows adds the output of each to the residual stream.
    """

    def __init__(
        self,
        *,
        attention_norm: RMSNorm,
        attention: nnx.Module,
        mlp_norm: RMSNorm,
        mlp: Callable[[Array, RowContext], Array],
    ):
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def attend(
        self,
        layer: int,
        x_TD: Array,
        delta_TD: Array | None,
        rotation: Rotation,
        context: AttentionContext,
    ) -> tuple[Array, Array]:
        """The residual stream [T, D] after attention, and the delta that is yet to be added to it.

        `x_TD` and `delta_TD` are the same of the block before.
        """
        x_TD, normed_TD = _add_norm(self.attention_norm, x_TD, delta_TD, context)
        return x_TD, self.attention(layer, normed_TD, rotation, context)

    def feed_forward(
        self, x_TD: Array, delta_TD: Array | None, context: RowContext
    ) -> tuple[Array, Array]:
        """The same after the feed-forward, which sees each token by itself."""
        x_TD, normed_TD = _add_norm(self.mlp_norm, x_TD, delta_TD, context)
        return x_TD, self.mlp(normed_TD, context)


class Decoder(nnx.Module):
    """Embedding, blocks, final norm, output head (None when tied to the embedding)."""

    def __init__(
        self,
        *,
        embed: Embedding,
        layers: Iterable[Block],
        norm: RMSNorm,
        head: Linear | None,
        rope: Rope,
    ):
        self.embed = embed
        self.layers = nnx.List(layers)
        self.norm = norm
        self.head = head
        self.rope = rope

    def __call__(self, token_T: Array, position_T: Array, context: AttentionContext) -> Array:
        """Hidden states after the final norm, [T, D].

        Tokens of several sequences may be mixed: the context keeps them apart.
        """
        return self.after_attention(*self.through_attention(token_T, position_T, context), context)

    def through_attention(
        self, token_T: Array, position_T: Array, context: AttentionContext
    ) -> tuple[Array, Array]:
        """The residual stream after the last attention, and the delta yet to be added, both [T, D].

        Up to here tokens see each other. `after_attention` then needs only the rows whose hidden
        states are wanted: one of a prompt.
        """
        x_TD, delta_TD = self.embed(token_T), None
        rotation = self.rope(position_T, context.prompt_length_T)
        for index, block in enumerate(self.layers):
            if index:
                x_TD, delta_TD = self.layers[index - 1].feed_forward(x_TD, delta_TD, context)
            x_TD, delta_TD = block.attend(index, x_TD, delta_TD, rotation, context)
        return x_TD, delta_TD

    def after_attention(self, x_RD: Array, delta_RD: Array | None, context: RowContext) -> Array:
        """Hidden states after the final norm, [R, D], of any rows from `through_attention`.

        `delta_RD` is None where it has been added.
        """
        x_RD, delta_RD = self.layers[-1].feed_forward(x_RD, delta_RD, context)
        return _add_norm(self.norm, x_RD, delta_RD, context)[1]

    def rules(self, names: Mapping[str, tuple[str, ...]]) -> Iterator[Rule]:
        """The checkpoint tensors that fill each module with a weight.

        `names` maps a module's dotted path, with {} for a layer's number, to the names of its
        checkpoint tensors without ".weight" and ".bias". Raises KeyError when a module is not in
        it.
        """
        for path, module in nnx.iter_modules(self):
            if not hasattr(module, "weight"):
                continue
            numbers = [step for step in path if isinstance(step, int)]
            key = ".".join("{}" if isinstance(step, int) else str(step) for step in path)
            for rule in module.rules(*(name.format(*numbers) for name in names[key])):
                yield replace(rule, parameter=".".join(map(str, (*path, rule.parameter))))

    def logits(self, hidden_RD: Array) -> Array:
        """Next-token logits [R, V] in float32."""
        weight = self.embed.weight if self.head is None else self.head.weight
        return contract(hidden_RD, weight[...], 1, jnp.float32)


def _add_norm(
    norm: RMSNorm, x_TD: Array, delta_TD: Array | None, context: RowContext
) -> tuple[Array, Array]:
    """The residual stream with `delta_TD` added (None: the first block), and its norm."""
    return (
        (x_TD, norm(x_TD))
        if delta_TD is None
        else context.add_norm(x_TD, delta_TD, norm.weight[...], norm.eps)
    )
