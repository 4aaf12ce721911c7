"""Logits to tokens on the device."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.sampling.choose import Sampler
from jaxllm.sampling.options import DRAW_COLUMNS
from pallas_kernels.draw import BROKEN, DrawRows, draw
from pallas_kernels.draw import choose as choose_draw
from pallas_kernels.draw import is_kernel as is_draw_kernel
from pallas_kernels.draw.reference import has_finite_maximum

__all__ = [
    "BROKEN",
    "DrawRows",
    "Sampler",
    "choose_draw",
    "draw_rows",
    "is_draw_kernel",
    "sample",
]


def draw_rows(columns: Mapping[str, Array], position_B: Array, banned_B: Array) -> DrawRows:
    """The arguments of a draw.

    Args:
        columns: of the slots, by name: `DRAW_COLUMNS`, `key` (uint32 [B, 2], the halves of the
            request's seed) and `stop_ids` (int32 [B, K], padded with -1).
        position_B: int32; of the token to be drawn.
        banned_B: bool; stop ids may not be drawn (min_tokens is not reached).
    """
    return DrawRows(
        **{f"{name}_B": columns[name] for name in DRAW_COLUMNS},
        key_B2=jax.vmap(_draw_key)(columns["key"], position_B),
        banned_BK=jnp.where(banned_B[:, None], columns["stop_ids"], -1),
    )


def sample(logits_BV: Array, rows: DrawRows, sampler: Sampler, backend: str = "reference") -> Array:
    """int32 `token_B`, `BROKEN` where the logits have no finite maximum.

    A draw depends on the row's logits, options, seed and position, not on other rows. `backend` is
    one of `pallas_kernels.draw`, which takes these logits in float32.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    if sampler >= Sampler.RANDOM:
        return draw(logits_BV, rows, backend=backend, filters=sampler >= Sampler.FILTERED)
    return jnp.where(
        has_finite_maximum(logits_BV), jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), BROKEN
    )


def _draw_key(key_2: Array, position: Array) -> Array:
    return jax.random.key_data(
        jax.random.fold_in(jax.random.wrap_key_data(key_2, impl="threefry2x32"), position)
    )
