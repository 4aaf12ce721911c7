"""Attention that reads the keys and values of an earlier layer."""

from __future__ import annotations

from flax import nnx

from jaxllm.nn.attention import PLAIN, Scoring, narrow_dim, stored_angles
from jaxllm.nn.contexts.protocol import AttentionContext
from jaxllm.nn.heads import Heads
from jaxllm.nn.linear import Init, Linear
from jaxllm.nn.norm import RMSNorm
from jaxllm.nn.rope import Rotation
from jaxllm.nn.rules import Rows
from pallas_kernels.parts import Product
from pallas_kernels.rope_write import HeadRows
from pallas_kernels.scaled_matmul import Inputs


class SharedAttention(nnx.Module):
    """Queries alone, of a layer whose cache is a `SharedKV`.

    `query` is [X, N/X, H, D]: the query heads of each shard. `back` says how many layers before
    this one the layer stands whose keys and values it reads.
    """

    def __init__(
        self,
        init: Init,
        heads: Heads,
        width: int,
        *,
        back: int,
        bias: bool = False,
        norm: RMSNorm | None = None,
        scoring: Scoring = PLAIN,
    ):
        order = heads.key_order
        self.query = Linear(
            init,
            (heads.shards, heads.query_per_shard, heads.stored_dim),
            (width,),
            ("shard", None, "head_dim", "embed"),
            bias,
            parts=(Rows(heads.query_per_shard, order=order),),
        )
        self.out = Linear(
            init,
            (width,),
            (heads.query, heads.stored_dim),
            ("embed", "heads", "head_dim"),
            bias,
            order=heads.value_order,
        )
        self.q_norm = norm
        self.heads = heads
        self.back = back
        self.window = scoring.window
        if scoring.scale is None:
            self.scale = heads.dim**-0.5
        else:
            self.scale = scoring.scale
        self.softcap = scoring.softcap

    @property
    def reader(self) -> Linear:
        """See `linear.reader_of`."""
        return self.query

    def __call__(
        self, layer: int, x_TD: Inputs, rotation: Rotation, context: AttentionContext
    ) -> Product:
        product = self.query.product_part(x_TD, context)
        bias = None
        if self.query.bias is not None:
            bias = self.query.bias[...]
        norms = None
        eps = 0.0
        if self.q_norm is not None:
            weight = self.q_norm.weight[...]
            # there are no keys for the second
            norms = (weight, weight)
            eps = self.q_norm.eps
        cos, sin = stored_angles(rotation, self.heads)
        queries = self.heads.query_per_shard
        dim = narrow_dim(self.heads)
        o_TNH = context.attend(
            layer - self.back,
            HeadRows(product, cos, sin, bias, norms, eps, queries, dim=dim),
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )
        return self.out.part(o_TNH, context)
