"""The attention context of encoders: whole prompts side by side, nothing cached."""

from __future__ import annotations

from jax import Array
from jax.sharding import Mesh

from jaxllm.cache.row_kernels import RowKernels
from pallas_kernels.rope_write import HeadRows, rotated
from pallas_kernels.segment_attention import segment_attention


class SegmentContext(RowKernels):
    """Tokens of the same prompt see each other, whatever their order.

    Args:
        segment_T: number of each token's prompt.
        longest: tokens of the longest prompt.
    """

    prompt_length_T: Array | None = None

    def __init__(self, segment_T: Array, longest: int, backend: str, mesh: Mesh):
        super().__init__(backend, mesh)
        self._segment_T, self._longest = segment_T, longest

    def attend(
        self,
        layer: int,
        rows: HeadRows,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        """Attention output `[T, N, H]`; a token sees those at most `window` away on either side.

        No encoder has soft caps or sinks.
        """
        assert softcap is None and sinks is None, "encoders have neither"
        q_TNH, k_TKH, v_TKH = (x.reshape(x.shape[0], -1, x.shape[-1]) for x in rotated(rows))
        return segment_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            self._segment_T,
            longest=self._longest,
            scale=scale,
            window=window,
        )
