"""Multi-head attention with fused, shard-interleaved projections.

The context owns keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.nn.contexts.protocol import AttentionContext, RowContext
from jaxllm.nn.head_maps import HeadMap
from jaxllm.nn.heads import Heads
from jaxllm.nn.linear import Init, Linear, Stored
from jaxllm.nn.norm import RMSNorm
from jaxllm.nn.rope import Rotation
from jaxllm.nn.rules import Piece, Rows, Rule
from pallas_kernels.parts import Product, whole
from pallas_kernels.quantised import SCALE_DTYPE
from pallas_kernels.rope_write import HeadRows
from pallas_kernels.scaled_matmul import Inputs


class Sinks(Stored):
    """One logit per query head, which joins the softmax's denominator and has no value."""

    def __init__(self, init: Init, heads: int):
        self.weight = init.full((heads,), ("heads",), 0.0)

    def rules(self, name: str) -> Iterator[Rule]:
        """The checkpoint tensor `name`, which has no suffix, fills them."""
        shape = self.weight.get_value().shape
        yield Rule("weight", (Piece(name, shape, shape),))


@dataclass(frozen=True)
class Scoring:
    """How products of queries and keys become scores.

    Attributes:
        window: tokens that a token sees, itself included; None sees all.
        scale: factor of the products; None is 1/sqrt(H).
        softcap: scores become softcap · tanh(score / softcap); None leaves them.
    """

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None


PLAIN = Scoring()


class Attention(nnx.Module):
    """Projections around the context's work: optional bias and QK-norm, RoPE, attention.

    `qkv` is [X, (N + 2K)/X, H, D]: the query heads of each shard, its key heads, its value heads.
    A `head_map`, where one is set, changes them before the context gets them.
    """

    head_map: HeadMap | None = None

    def __init__(
        self,
        init: Init,
        heads: Heads,
        width: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norms: tuple[RMSNorm, RMSNorm] | None = None,
        scoring: Scoring = PLAIN,
        sinks: bool = False,
    ):
        key = Rows(heads.kv_per_shard, heads.repeat, heads.key_order)
        value = Rows(heads.kv_per_shard, heads.repeat, heads.value_order)
        self.qkv = Linear(
            init,
            (heads.shards, heads.query_per_shard + 2 * heads.kv_per_shard, heads.stored_dim),
            (width,),
            ("shard", None, "head_dim", "embed"),
            qkv_bias,
            parts=(Rows(heads.query_per_shard, order=heads.key_order), key, value),
        )
        self.out = Linear(
            init,
            (width,),
            (heads.query, heads.stored_dim),
            ("embed", "heads", "head_dim"),
            out_bias,
            order=heads.value_order,
        )
        q_norm = None
        k_norm = None
        if qk_norms is not None:
            q_norm, k_norm = qk_norms
        # An attribute that was None cannot become a module, so each is set once
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.sinks = Sinks(init, heads.query) if sinks else None
        self.kv_scales: nnx.Param | None = None
        self.heads = heads
        self.window = scoring.window
        if scoring.scale is None:
            self.scale = heads.dim**-0.5
        else:
            self.scale = scoring.scale
        self.softcap = scoring.softcap

    def take_kv_scales(self) -> None:
        """Add a parameter `[K, 2]` with scales of this layer's keys and values, for 8-bit pages."""
        self.kv_scales = nnx.data(
            nnx.Param(jnp.ones((self.heads.kv_stored, 2), SCALE_DTYPE), axes=("kv_heads", None))
        )

    @property
    def reader(self) -> Linear:
        """See `linear.reader_of`."""
        return self.qkv

    def __call__(
        self, layer: int, x_TD: Inputs, rotation: Rotation, context: AttentionContext
    ) -> Product:
        sinks = None
        if self.sinks is not None:
            sinks = self.sinks.weight[...]
        o_TNH = context.attend(
            layer,
            self._rows(x_TD, rotation, context),
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=sinks,
        )
        return self.out.part(o_TNH, context)

    def _rows(self, x_TD: Inputs, rotation: Rotation, context: RowContext) -> HeadRows:
        """Heads in the model's order: shard x holds query heads from x·N/X on, and their KV
        heads."""
        bias = None
        if self.qkv.bias is not None:
            bias = self.qkv.bias[...]
        product: Product = self.qkv.product_part(x_TD, context)
        norms = None
        eps = 0.0
        if self.head_map is not None:
            if bias is None:
                product = whole(product)
            else:
                product = whole(product) + bias
            queries = self.heads.query_per_shard
            product, rotation = self.head_map(product, queries, rotation, context)
            bias = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight[...], self.k_norm.weight[...])
            eps = self.q_norm.eps
        scales = None
        if self.kv_scales is not None:
            scales = self.kv_scales[...]
        cos, sin = stored_angles(rotation, self.heads)
        queries = self.heads.query_per_shard
        dim = narrow_dim(self.heads)
        return HeadRows(product, cos, sin, bias, norms, eps, queries, scales, dim=dim)


def stored_angles(rotation: Rotation, heads: Heads) -> tuple[Array, Array]:
    """Cosines and sines `[T, stored_dim/2]` for heads as they are stored: numbers beyond a head's
    own are not rotated."""
    cos = rotation.cos_TF
    sin = rotation.sin_TF
    if heads.stored_dim == heads.dim:
        return cos, sin
    wider = ((0, 0), (0, (heads.stored_dim - heads.dim) // 2))
    return jnp.pad(cos, wider, constant_values=1.0), jnp.pad(sin, wider)


def narrow_dim(heads: Heads) -> int | None:
    """Numbers of a head that are its own, where it is stored wider; None: all."""
    if heads.stored_dim == heads.dim:
        return None
    return heads.dim
