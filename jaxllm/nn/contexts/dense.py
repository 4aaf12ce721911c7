"""Plain causal attention over whole sequences: training, research and golden tests."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.cache.states import Cell, scan_tokens
from jaxllm.nn.contexts.rows import PlainRows
from pallas_kernels.latent_decode import LatentRows, absorbed, projected
from pallas_kernels.rope_write import HeadRows, rotated


def heads(rows: HeadRows) -> tuple[Array, Array, Array]:
    """Queries, keys and values `[T, heads, H]` of all shards, with bias, norm and rotation."""
    q_TNH, k_TKH, v_TKH = map(_flat, rotated(rows))
    return q_TNH, k_TKH, v_TKH


def _flat(x: Array) -> Array:
    """`[T, …, heads, H]` as `[T, heads, H]`."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])


def _softmax(score_KGTS: Array, sinks_N: Array | None) -> Array:
    """Weights over the last axis; a sink is one more key, whose weight is dropped."""
    if sinks_N is None:
        return jax.nn.softmax(score_KGTS, axis=-1)
    K, G, T, _ = score_KGTS.shape
    sink_KGT1 = jnp.broadcast_to(sinks_N.astype(jnp.float32).reshape(K, G, 1, 1), (K, G, T, 1))
    return jax.nn.softmax(jnp.concatenate([score_KGTS, sink_KGT1], axis=-1), axis=-1)[..., :-1]


class DenseContext(PlainRows):
    """Attention among the tokens of one call: differentiable, and usable under jit and vmap.

    Memory grows with T².

    Attributes:
        segment_T: number of each token's sequence (int) where several are packed; None: one.
        prompt_length_T: prompt length of each token's sequence, for dynamic RoPE scaling; by
            default the whole sequence.
    """

    def __init__(self, segment_T: Array | None = None, prompt_length_T: Array | None = None):
        self.segment_T = segment_T
        if prompt_length_T is None and segment_T is not None:
            prompt_length_T = jnp.sum(
                segment_T[:, None] == segment_T[None, :], axis=1, dtype=jnp.int32
            )
        self.prompt_length_T = prompt_length_T
        # Keys and values of each layer, for later ones that have none of their own
        self._kept: dict[int, tuple[Array, Array]] = {}

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
        """softmax(q·k · scale) · v in float32 over at most `window` tokens of the same segment."""
        q_TNH, k_TKH, v_TKH = heads(rows)
        if rows.keys:
            self._kept[layer] = (k_TKH, v_TKH)
        else:
            k_TKH, v_TKH = self._kept[layer]
        return self._attend(q_TNH, k_TKH, v_TKH, scale, window, softcap, sinks)

    def scan(self, layer: int, cell: Cell, rows: Any) -> Any:
        """The cell's outputs, of one sequence after the other: tokens of a segment stand
        together."""
        tokens = jax.tree.leaves(rows)[0].shape[0]
        begins_T = jnp.arange(tokens) == 0
        if self.segment_T is not None:
            begins_T |= self.segment_T != jnp.roll(self.segment_T, 1)
        return scan_tokens(cell, rows, begins_T)

    def attend_latent(self, layer: int, rows: LatentRows, *, scale: float) -> Array:
        """The same over entries, which are keys, and whose first numbers are values."""
        rank = rows.up.keys_NEV.shape[-1]
        q_TNW = absorbed(rows.q_TNH, rows.up)
        entry_T1W = rows.entry_TW[:, None]
        o_TNV = self._attend(q_TNW, entry_T1W, entry_T1W[..., :rank], scale)
        return projected(o_TNV, rows.up)

    def _attend(
        self,
        q_TNH: Array,
        k_TKH: Array,
        v_TKV: Array,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        tokens, kv_heads = k_TKH.shape[:2]
        q = q_TNH.reshape(tokens, kv_heads, -1, q_TNH.shape[-1])
        precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        score = (
            jnp.einsum(
                "tkgh,skh->kgts", q, k_TKH, precision=precision, preferred_element_type=jnp.float32
            )
            * scale
        )
        if softcap is not None:
            score = softcap * jnp.tanh(score / softcap)
        score = jnp.where(self._mask(tokens, window), score, jnp.finfo(jnp.float32).min)
        weight = _softmax(score, sinks).astype(v_TKV.dtype)
        out = jnp.einsum("kgts,skh->tkgh", weight, v_TKV, precision=precision)
        return out.reshape(*q_TNH.shape[:2], -1)

    def _mask(self, tokens: int, window: int | None) -> Array:
        """[T, T] true where row t may see column s."""
        index = jnp.arange(tokens)
        distance = index[:, None] - index[None, :]
        mask = distance >= 0
        if window is not None:
            mask &= distance < window
        if self.segment_T is not None:
            mask &= self.segment_T[:, None] == self.segment_T[None, :]
        return mask
