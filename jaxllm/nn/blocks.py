"""Transformer blocks: how attention and feed-forward join the residual stream."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.cache.collective import Collective
from jaxllm.nn.contexts.protocol import AttentionContext, RowContext
from jaxllm.nn.linear import Linear, reader_of
from jaxllm.nn.mlp import FeedForward
from jaxllm.nn.norm import Norm, RMSNorm
from jaxllm.nn.rope import Rotation
from jaxllm.nn.row_facts import NO_FACTS, RowFacts
from pallas_kernels.parts import Product, whole
from pallas_kernels.scaled_matmul import Inputs


class Carry(NamedTuple):
    """What one part of a model hands to the next; every leaf is [T, …].

    Attributes:
        x_TD: the residual stream.
        part_TD: this device's part of what is yet to be added to it, by the norm that follows; None
            where it has been added.
        beside_TE: whatever else the block's own feed-forward reads; None for most blocks.
        delta_TD: in place of a part, the whole of what is yet to be added, or of what its norm is.
        facts: of the rows. A block may leave them out of the carry that it makes: the decoder
            keeps them.
    """

    x_TD: Array
    part_TD: Product | None = None
    beside_TE: Array | None = None
    delta_TD: Product | None = None
    facts: RowFacts = NO_FACTS

    def normed(
        self, norm: Norm, context: RowContext, reader: Linear | None = None
    ) -> tuple[Array, Inputs]:
        """The residual stream with everything added, and its norm, plain or as its `reader` may
        have it."""
        rounding = None
        if reader is not None:
            rounding = reader.rounding(len(self.x_TD), context)
        if self.part_TD is not None:
            return norm.add(self.x_TD, self.part_TD, context, rounding)
        if self.delta_TD is not None:
            return norm.add(self.x_TD, self.delta_TD, context.alone, rounding)
        return self.x_TD, norm(self.x_TD)

    def settled(self, collective: Collective) -> Array:
        """The residual stream with everything added."""
        if self.part_TD is not None:
            return self.x_TD + collective.sum(self.part_TD)
        return self._with_delta

    @property
    def _with_delta(self) -> Array:
        if self.delta_TD is None:
            return self.x_TD
        return self.x_TD + whole(self.delta_TD)

    def rows(self, row_R: Array) -> Carry:
        """These rows alone."""
        part_TD = self.part_TD
        delta_TD = self.delta_TD
        if part_TD is not None:
            part_TD = whole(part_TD)
        if delta_TD is not None:
            delta_TD = whole(delta_TD)
        carry = self._replace(part_TD=part_TD, delta_TD=delta_TD, facts=NO_FACTS)
        picked = jax.tree.map(lambda leaf: leaf[row_R], carry)
        return picked._replace(facts=self.facts.rows(row_R))

    def packed(self, collective: Collective) -> Array:
        """This device's part of one array [T, `ModelSpec.carry_width`], see `Decoder.unpacked`.

        What is summed later costs nothing where nobody asks for it.
        """
        packed_TD = collective.once(self._with_delta)
        if self.part_TD is not None:
            packed_TD = packed_TD + whole(self.part_TD)
        if self.beside_TE is None:
            return packed_TD
        return jnp.concatenate([packed_TD, collective.once(self.beside_TE)], axis=1)


class Block(nnx.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)).

    The norm that follows adds the output of each to the residual stream.
    """

    def __init__(
        self,
        *,
        attention_norm: Norm,
        attention: nnx.Module,
        mlp_norm: Norm | None,
        mlp: FeedForward,
    ):
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def attend(
        self, layer: int, carry: Carry, rotation: Rotation, context: AttentionContext
    ) -> Carry:
        """The carry after attention; `carry` is that of the block before."""
        x_TD, normed_TD = carry.normed(self.attention_norm, context, reader_of(self.attention))
        return Carry(x_TD, self.attention(layer, normed_TD, rotation, context))

    def feed_forward(self, carry: Carry, context: RowContext) -> Carry:
        """The carry after the feed-forward, which sees each token by itself."""
        assert self.mlp_norm is not None
        x_TD, normed_TD = carry.normed(self.mlp_norm, context, reader_of(self.mlp))
        return Carry(x_TD, self.mlp(normed_TD, context))


class ScaledBlock(Block):
    """Pre-norm block whose two outputs are multiplied by `factor`."""

    def __init__(
        self,
        *,
        attention_norm: Norm,
        attention: nnx.Module,
        mlp_norm: Norm,
        mlp: FeedForward,
        factor: float,
    ):
        super().__init__(
            attention_norm=attention_norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp
        )
        self.factor = factor

    def attend(
        self, layer: int, carry: Carry, rotation: Rotation, context: AttentionContext
    ) -> Carry:
        return self._scaled(super().attend(layer, carry, rotation, context))

    def feed_forward(self, carry: Carry, context: RowContext) -> Carry:
        return self._scaled(super().feed_forward(carry, context))

    def _scaled(self, carry: Carry) -> Carry:
        assert carry.part_TD is not None
        part_TD = whole(carry.part_TD)
        scaled_TD = part_TD.astype(jnp.float32) * self.factor  # rounded once
        return carry._replace(part_TD=scaled_TD.astype(part_TD.dtype))


class SandwichBlock(Block):
    """Norms before and after: x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(
        self,
        *,
        attention_norm: Norm,
        attention: nnx.Module,
        attention_out_norm: Norm,
        mlp_norm: Norm,
        mlp: FeedForward,
        mlp_out_norm: Norm,
    ):
        super().__init__(
            attention_norm=attention_norm, attention=attention, mlp_norm=mlp_norm, mlp=mlp
        )
        self.attention_out_norm = attention_out_norm
        self.mlp_out_norm = mlp_out_norm

    def attend(
        self, layer: int, carry: Carry, rotation: Rotation, context: AttentionContext
    ) -> Carry:
        x_TD, part_TD, *_ = super().attend(layer, carry, rotation, context)
        delta_TD = _later(self.attention_out_norm, context.collective.sum(part_TD))
        return Carry(x_TD, delta_TD=delta_TD)

    def feed_forward(self, carry: Carry, context: RowContext) -> Carry:
        x_TD, part_TD, *_ = super().feed_forward(carry, context)
        return Carry(x_TD, delta_TD=_later(self.mlp_out_norm, context.collective.sum(part_TD)))


def _later(norm: Norm, y_TD: Array) -> Product:
    """The norm of y, which the norm that follows takes along where it can."""
    if isinstance(norm, RMSNorm):
        return norm.later(y_TD)
    return norm(y_TD)


class PostNormBlock(Block):
    """Norms after alone: x + norm(attention(x)), then x + norm(mlp(x))."""

    def attend(
        self, layer: int, carry: Carry, rotation: Rotation, context: AttentionContext
    ) -> Carry:
        x_TD = carry.settled(context.collective)
        part_TD = self.attention(layer, x_TD, rotation, context)
        return Carry(x_TD, delta_TD=self.attention_norm(context.collective.sum(part_TD)))

    def feed_forward(self, carry: Carry, context: RowContext) -> Carry:
        assert self.mlp_norm is not None
        x_TD = carry.settled(context.collective)
        part_TD = self.mlp(x_TD, context)
        return Carry(x_TD, delta_TD=self.mlp_norm(context.collective.sum(part_TD)))


class ResidualNormBlock(Block):
    """Norms over the sums: norm(x + attention(x)), then norm(x + mlp(x)), as BERT has them."""

    def attend(
        self, layer: int, carry: Carry, rotation: Rotation, context: AttentionContext
    ) -> Carry:
        x_TD = carry.settled(context.collective)
        part_TD = self.attention(layer, x_TD, rotation, context)
        return Carry(self.attention_norm.add(x_TD, part_TD, context)[1])

    def feed_forward(self, carry: Carry, context: RowContext) -> Carry:
        assert self.mlp_norm is not None
        x_TD = carry.settled(context.collective)
        return Carry(self.mlp_norm.add(x_TD, self.mlp(x_TD, context), context)[1])


class ParallelBlock(Block):
    """Both parts read the same x: x + attention(norm(x)) + mlp(norm(x)).

    Without a norm of its own the feed-forward reads what attention reads. Its input is carried
    beside the residual stream, which doubles `ModelSpec.carry_width`.
    """

    def attend(
        self, layer: int, carry: Carry, rotation: Rotation, context: AttentionContext
    ) -> Carry:
        x_TD, normed_TD = carry.normed(self.attention_norm, context)
        if self.mlp_norm is None:
            beside_TD = normed_TD
        else:
            beside_TD = self.mlp_norm(x_TD)
        return Carry(x_TD, self.attention(layer, normed_TD, rotation, context), beside_TD)

    def feed_forward(self, carry: Carry, context: RowContext) -> Carry:
        part_TD = self.mlp(carry.beside_TE, context)
        if carry.part_TD is not None:
            part_TD = whole(carry.part_TD) + whole(part_TD)
        return Carry(carry.x_TD, part_TD)
