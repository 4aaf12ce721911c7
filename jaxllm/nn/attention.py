"""Multi-head attention with fused, shard-interleaved projections.

The context owns keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.nn.heads import Heads
from jaxllm.nn.linear import Init, Linear, Stored
from jaxllm.nn.norm import RMSNorm
from jaxllm.nn.rope import Rotation
from jaxllm.nn.rules import Piece, Rows, Rule
from pallas_kernels.grouped_matmul import Gating, Groups
from pallas_kernels.quantised import SCALE_DTYPE
from pallas_kernels.rope_write import HeadRows


class RowContext(Protocol):
    """Computes what lies between the linear maps of a block, for each token by itself."""

    def add_norm(
        self, x_TD: Array, delta_TD: Array, weight_D: Array, eps: float
    ) -> tuple[Array, Array]:
        """`x + delta`, and its root-mean-square norm times the weight.

        See `pallas_kernels.add_norm`.
        """

    def gated_product(self, x_TD: Array, weight_X2FD: Array) -> Array | None:
        """silu(gate(x)) · up(x) `[T, X·F]` in one pass; None where two products are faster.

        See `pallas_kernels.gated_matmul`.
        """

    def grouped_product(
        self, x_PI: Array, weight_EOI: Array, groups: Groups, gating: Gating | None
    ) -> Array:
        """Each row times the weight of its expert; with `gating`, of gate and up.

        See `pallas_kernels.grouped_matmul`.
        """


class AttentionContext(RowContext, Protocol):
    """Holds keys and values during one forward.

    Attributes:
        prompt_length_T: prompt length of each token's request (int32); None when all tokens are
            one prompt. Only dynamic RoPE scaling reads it.
    """

    @property
    def prompt_length_T(self) -> Array | None: ...

    def attend(
        self,
        layer: int,
        rows: HeadRows,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Array | None = None,
    ) -> Array:
        """Attention output `[T, N, H]` in the dtype of the rows `[T, X, C, H]` of X shards.

        Bias, norm and RoPE are applied to the rows; keys and values of these tokens are kept.
        `sinks` `[N]` adds one logit per query head to the softmax's denominator, unscaled.
        """


class Sinks(Stored):
    """One logit per query head, which joins the softmax's denominator and has no value."""

    def __init__(self, init: Init, heads: int):
        self.weight = init.full((heads,), ("heads",), 0.0)

    def rules(self, name: str) -> Iterator[Rule]:
        """The checkpoint tensor `name`, which has no suffix, fills them."""
        shape = self.weight.get_value().shape
        yield Rule("weight", (Piece(name, shape, shape),))


class Attention(nnx.Module):
    """Projections around the context's work: optional bias and QK-norm, RoPE, attention.

    `qkv` is [X, (N + 2K)/X, H, D]: the query heads of each shard, its key heads, its value heads.
    A token sees `window` tokens, itself included; None sees all.
    """

    def __init__(
        self,
        init: Init,
        heads: Heads,
        width: int,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        window: int | None = None,
        sinks: bool = False,
    ):
        kv = Rows(heads.kv_per_shard, heads.repeat)
        self.qkv = Linear(
            init,
            (heads.shards, heads.query_per_shard + 2 * heads.kv_per_shard, heads.dim),
            (width,),
            ("shard", None, "head_dim", "embed"),
            qkv_bias,
            parts=(Rows(heads.query_per_shard), kv, kv),
        )
        self.out = Linear(
            init,
            (width,),
            (heads.query, heads.dim),
            ("embed", "heads", "head_dim"),
            out_bias,
        )
        self.q_norm, self.k_norm = (
            None if qk_norm_eps is None else RMSNorm(init, heads.dim, qk_norm_eps, "head_dim")
            for _ in "qk"
        )
        self.sinks = Sinks(init, heads.query) if sinks else None
        self.kv_scales: nnx.Param | None = None
        self.heads = heads
        self.window = window

    def take_kv_scales(self) -> None:
        """Add a parameter `[K, 2]` with scales of this layer's keys and values, for 8-bit pages."""
        self.kv_scales = nnx.data(
            nnx.Param(jnp.ones((self.heads.kv_stored, 2), SCALE_DTYPE), axes=("kv_heads", None))
        )

    def __call__(
        self, layer: int, x_TD: Array, rotation: Rotation, context: AttentionContext
    ) -> Array:
        o_TNH = context.attend(
            layer,
            self._rows(x_TD, rotation),
            scale=self.heads.dim**-0.5,
            window=self.window,
            softcap=None,
            sinks=None if self.sinks is None else self.sinks.weight[...],
        )
        return self.out(o_TNH)

    def _rows(self, x_TD: Array, rotation: Rotation) -> HeadRows:
        """Heads in the model's order: shard x holds query heads from x·N/X on, and their KV
        heads."""
        bias = None if self.qkv.bias is None else self.qkv.bias[...]
        norms, eps = None, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            norms, eps = (self.q_norm.weight[...], self.k_norm.weight[...]), self.q_norm.eps
        scales = None if self.kv_scales is None else self.kv_scales[...]
        return HeadRows(
            self.qkv.product(x_TD), *rotation, bias, norms, eps, self.heads.query_per_shard, scales
        )
