"""Draws from logits whose vocabulary is split over the devices of a mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.sampling import sample as whole
from jaxllm.sampling.sample import BROKEN, DrawRows, Sampler


@dataclass(frozen=True)
class SplitVocabulary:
    """`sampling.sample` for a device that has its share of every row's logits.

    The most likely token is found by swapping each device's best. Other draws read whole rows:
    each device gets all logits of its share of the rows, or, where rows do not divide, of all.

    Attributes:
        axis: the mesh axis.
        size: devices on it.
    """

    axis: str
    size: int

    def sample(self, logits_BW: Array, rows: DrawRows, sampler: Sampler, backend: str) -> Array:
        """int32 `token_B` on every device, of `logits_BW` of W = V / size tokens."""
        if sampler is Sampler.GREEDY:
            return self._best(logits_BW.astype(jnp.float32))
        count = logits_BW.shape[0]
        if count % self.size:
            logits_BV = lax.all_gather(logits_BW, self.axis, axis=1, tiled=True)
            return whole.sample(logits_BV, rows, sampler, backend)
        own_RV = lax.all_to_all(logits_BW, self.axis, split_axis=0, concat_axis=1, tiled=True)
        share = count // self.size
        first = lax.axis_index(self.axis) * share
        own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, share), rows)
        return lax.all_gather(whole.sample(own_RV, own, sampler, backend), self.axis, tiled=True)

    def _best(self, logits_BW: Array) -> Array:
        """Of equal logits the first."""
        first = lax.axis_index(self.axis) * logits_BW.shape[1]
        place_B = first + jnp.argmax(logits_BW, axis=-1).astype(jnp.int32)
        # XLA's maximum on the CPU loses NaN in long rows
        broken_B = jnp.isnan(logits_BW).any(axis=-1)
        value_B = jnp.where(broken_B, jnp.nan, logits_BW.max(axis=-1))
        pair_B2 = jnp.stack([lax.bitcast_convert_type(value_B, jnp.int32), place_B], axis=1)
        all_XB2 = lax.all_gather(pair_B2, self.axis)
        value_XB = lax.bitcast_convert_type(all_XB2[:, :, 0], jnp.float32)
        broken_B = jnp.isnan(value_XB).any(axis=0) | ~jnp.isfinite(value_XB.max(axis=0))
        best_1B = jnp.argmax(value_XB, axis=0)[None]
        return jnp.where(broken_B, BROKEN, jnp.take_along_axis(all_XB2[:, :, 1], best_1B, 0)[0])
