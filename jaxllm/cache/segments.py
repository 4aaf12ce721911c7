"""The attention context of encoders: whole prompts side by side, nothing cached."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from jaxllm.cache.collective import ALONE, Collective
from jaxllm.cache.row_kernels import RowKernels
from pallas_kernels.rope_write import HeadRows, rotated
from pallas_kernels.segment_attention import BACKENDS, segment_attention
from pallas_kernels.segment_attention import Segments as Segments
from pallas_kernels.target import PORTABLE, Target

# Jitted, so that a kernel is lowered once, not for every layer
_segment_attention = jax.jit(segment_attention, static_argnames=("scale", "window", "backend"))


class SegmentContext(RowKernels):
    """Tokens of the same prompt, which are `segments`, see each other, whatever their order; on one
    of the devices of `collective`, over its own heads. Attention is of a back end; other
    kernels are chosen for `target`."""

    def __init__(
        self,
        segments: Segments,
        backend: str,
        collective: Collective = ALONE,
        target: Target = PORTABLE,
    ):
        super().__init__(target, collective)
        self._backend = backend
        self.prompt_length_T = segments.end_T - segments.first_T
        self._segments = segments
        self._plans: dict[int | None, Any] = {}  # by window, one for all layers with it

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
        return _segment_attention(
            q_TNH,
            k_TKH,
            v_TKH,
            self._segments,
            scale=scale,
            window=window,
            plan=self._plan(window),
            backend=self._backend,
        )

    def _plan(self, window: int | None) -> Any:
        """The back end's plan, or None where it makes none."""
        planner = BACKENDS.planner(self._backend)
        if planner is not None and window not in self._plans:
            self._plans[window] = planner(self._segments, window=window)
        return self._plans.get(window)
