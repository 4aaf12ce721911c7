"""Logits to tokens on the device."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.sampling.choose import Sampler
from pallas_kernels.draw import BROKEN, DrawRows, draw
from pallas_kernels.draw import backend_for as backend_for
from pallas_kernels.draw.reference import whole

__all__ = ["BROKEN", "Sampler", "SamplingRows", "draw_rows", "sample"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """What each of B rows asks for."""

    temperature_B: Array  # float32; 0 = the most likely token
    top_k_B: Array  # int32; 0 or less keeps all
    top_p_B: Array  # float32; 1 keeps all
    min_p_B: Array  # float32; 0 keeps all
    key_B2: Array  # uint32, the halves of the request's 64-bit seed
    position_B: Array  # int32, the position that the new token will have
    stop_ids_BK: Array  # int32, padded with -1
    suppress_B: Array  # bool; the stop ids are impossible (min_tokens not reached)


def sample(
    logits_BV: Array, rows: SamplingRows, sampler: Sampler, backend: str = "reference"
) -> Array:
    """int32 `token_B`, `BROKEN` where the logits have no finite maximum. A draw depends on the
    row's logits, options, seed and position, never on its neighbours or its place.

    `backend` is one of `pallas_kernels.draw`; logits that it does not take are drawn by the
    reference.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    if sampler >= Sampler.RANDOM:
        return draw(
            logits_BV,
            draw_rows(rows),
            backend=backend_for(logits_BV, backend),
            filters=sampler >= Sampler.FILTERED,
        )
    return jnp.where(whole(logits_BV), jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), BROKEN)


def draw_rows(rows: SamplingRows) -> DrawRows:
    """The rows' options as a draw takes them: one key a draw, and the tokens that are
    impossible."""
    key_B2 = jax.vmap(_draw_key)(rows.key_B2, rows.position_B)
    banned_BK = jnp.where(rows.suppress_B[:, None], rows.stop_ids_BK, -1)
    return DrawRows(rows.temperature_B, rows.top_k_B, rows.top_p_B, rows.min_p_B, key_B2, banned_BK)


def _draw_key(key_2: Array, position: Array) -> Array:
    return jax.random.key_data(
        jax.random.fold_in(jax.random.wrap_key_data(key_2, impl="threefry2x32"), position)
    )
