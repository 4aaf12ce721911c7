"""Multi-head latent attention: keys and values of all heads come from one small latent a token.

The context owns the latents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.nn.contexts.protocol import LatentContext, RowContext
from jaxllm.nn.linear import Init, Linear, Stored
from jaxllm.nn.norm import RMSNorm
from jaxllm.nn.rope import Rotation, rotary_order
from jaxllm.nn.rules import Part, Piece, Rows, Rule
from pallas_kernels.latent_decode import LatentRows, UpProjections
from pallas_kernels.rope_write import turned


@dataclass(frozen=True)
class LatentHeads:
    """Sizes of latent attention.

    Attributes:
        heads: query heads.
        rank: width of the latent.
        plain: numbers of a query that meet a key of the latent, and do not turn.
        rope: numbers of a query that turn, and meet the key that all heads share.
        value: width of a head's value.
        paired: 2i and 2i + 1 of the turning numbers turn together, not i and i + half.
    """

    heads: int
    rank: int
    plain: int
    rope: int
    value: int
    paired: bool = True

    def order(self, before: int) -> tuple[int, ...]:
        """The checkpoint's number of each entry where `before` entries precede those that turn."""
        turning = rotary_order(self.rope, self.rope, self.paired)
        return (*range(before), *(before + i for i in turning or range(self.rope)))


class UpProjection(Stored):
    """The rows of one kind in a checkpoint's matrix that makes keys and values of the latent: of
    each head those from `start` on.

    `weight` is `[N, rows, rank]`; `total` are a head's rows of both kinds.
    """

    def __init__(self, init: Init, sizes: LatentHeads, rows: int, start: int):
        self.weight = init.normal((sizes.heads, rows, sizes.rank), ("heads", None, None))
        self.start = start
        self.total = sizes.plain + sizes.value

    def rules(self, name: str) -> Iterator[Rule]:
        """The checkpoint tensor `{name}.weight` fills the weight, with the other kind's rows."""
        heads, rows, rank = view = self.weight.get_value().shape
        part = Part((heads, self.total, rank), 1, self.start, self.start + rows)
        source = (heads * self.total, rank)
        yield Rule("weight", (Piece(f"{name}.weight", source, view, steps=(part,)),))


class LowRank(nnx.Module):
    """Two linear maps with a norm between them: up(norm(down(x)))."""

    def __init__(self, down: Linear, norm: RMSNorm, up: Linear):
        self.down = down
        self.norm = norm
        self.up = up

    def __call__(self, x_TD: Array, context: RowContext) -> Array:
        return self.up(self.norm(self.down(x_TD, context)), context)


class LatentAttention(nnx.Module):
    """Projections around the context's work.

    A token's entry is norm(latent), then the turned key. `query_rank` is the width between two maps
    to the queries; None is one map. `eps` is that of the norms inside.
    """

    def __init__(
        self,
        init: Init,
        sizes: LatentHeads,
        width: int,
        *,
        scale: float,
        eps: float,
        query_rank: int | None = None,
        bias: bool = False,
    ):
        self.query = _queries(init, sizes, width, query_rank, eps, bias)
        self.entry = Linear(
            init,
            (1, 1, sizes.rank + sizes.rope),
            (width,),
            (None, None, None, "embed"),
            bias,
            parts=(Rows(1, order=sizes.order(sizes.rank)),),
        )
        self.entry_norm = RMSNorm(init, sizes.rank, eps, "head_dim")
        self.key = UpProjection(init, sizes, sizes.plain, 0)
        self.value = UpProjection(init, sizes, sizes.value, sizes.plain)
        self.out = Linear(
            init, (width,), (sizes.heads, sizes.value), ("embed", "heads", "head_dim"), bias
        )
        self.sizes = sizes
        self.scale = scale

    def __call__(
        self, layer: int, x_TD: Array, rotation: Rotation, context: LatentContext
    ) -> Array:
        q_TNH = self.query(x_TD, context)[:, 0]
        entry_TW = self.entry(x_TD, context)[:, 0, 0]
        rank = self.sizes.rank
        latent_TV = self.entry_norm(entry_TW[:, :rank])
        key_TR = entry_TW[:, rank:]
        rows = LatentRows(
            _turned_end(q_TNH, self.sizes.plain, rotation),
            jnp.concatenate([latent_TV, turned(key_TR, rotation.cos_TF, rotation.sin_TF)], axis=-1),
            UpProjections(self.key.weight[...], self.value.weight[...]),
        )
        return self.out(context.attend_latent(layer, rows, scale=self.scale), context)


def _queries(
    init: Init, sizes: LatentHeads, width: int, rank: int | None, eps: float, bias: bool
) -> Linear | LowRank:
    """The map to the queries; only the first of two maps has the bias."""
    heads = Linear(
        init,
        (1, sizes.heads, sizes.plain + sizes.rope),
        (width if rank is None else rank,),
        (None, "heads", "head_dim", "embed"),
        parts=(Rows(sizes.heads, order=sizes.order(sizes.plain)),),
    )
    if rank is None:
        return heads
    down = Linear(init, (rank,), (width,), (None, "embed"), bias)
    return LowRank(down, RMSNorm(init, rank, eps, "head_dim"), heads)


def _turned_end(q_TNH: Array, plain: int, rotation: Rotation) -> Array:
    cos_T1F = rotation.cos_TF[:, None]
    sin_T1F = rotation.sin_TF[:, None]
    end = turned(q_TNH[..., plain:], cos_T1F, sin_T1F)
    return jnp.concatenate([q_TNH[..., :plain], end], axis=-1)
