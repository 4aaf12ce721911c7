"""Attention for training on a GPU: fused, so that the scores of long rows are never stored. The
engine's dense context is the reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm.nn.contexts.dense import DenseContext, heads
from pallas_kernels.rope_write import HeadRows


class FusedContext(DenseContext):
    """Causal attention over packed rows through the vendor's fused kernel. Tokens arrive flat, row
    after row, in bfloat16."""

    def __init__(self, rows: int, segment_BT: jax.Array | None = None):
        super().__init__()
        self._rows = rows
        self._mask = (
            None
            if segment_BT is None
            else (segment_BT[:, None, :, None] == segment_BT[:, None, None, :])
        )

    def attend(
        self,
        layer: int,
        rows: HeadRows,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Attention output `[T, N, H]`; a token sees earlier tokens of its row and segment."""
        del layer
        if window is not None or softcap is not None or sinks is not None:
            raise ValueError(
                "FusedContext knows no sliding windows, soft caps and sinks; use DenseContext"
            )
        q_TNH, k_TKH, v_TKH = heads(rows)
        q, k, v = (x.reshape(self._rows, -1, *x.shape[1:]) for x in (q_TNH, k_TKH, v_TKH))
        out = jax.nn.dot_product_attention(
            q, k, v, mask=self._mask, scale=scale, is_causal=True, implementation="cudnn"
        )
        return out.reshape(q_TNH.shape).astype(jnp.bfloat16)
