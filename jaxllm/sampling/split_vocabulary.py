"""Draws from logits whose vocabulary is split over the devices of a mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.sampling import sample as whole
from jaxllm.sampling.sample import BROKEN, DrawRows, Sampler
from pallas_kernels.all_reduce import Group, gather_backend, largest


@dataclass(frozen=True)
class SplitVocabulary:
    """`sampling.sample` for a device that has its share of every row's logits.

    The most likely token is found by swapping each device's best. Other draws read whole rows:
    each device gets all logits of its share of the rows, or, where rows do not divide, of all.

    Attributes:
        group: the devices. With inboxes they swap through these.
    """

    group: Group

    def sample(self, logits_BW: Array, rows: DrawRows, sampler: Sampler, backend: str) -> Array:
        """int32 `token_B` on every device, of `logits_BW` of W = V / size tokens."""
        if sampler is Sampler.GREEDY:
            return self._best(logits_BW.astype(jnp.float32))
        count = logits_BW.shape[0]
        if count % self.group.devices:
            logits_BV = lax.all_gather(logits_BW, self.group.axis, axis=1, tiled=True)
            return whole.sample(logits_BV, rows, sampler, backend)
        own_RV = lax.all_to_all(logits_BW, self.group.axis, split_axis=0, concat_axis=1, tiled=True)
        share = count // self.group.devices
        first = lax.axis_index(self.group.axis) * share
        local = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, share), rows)
        return lax.all_gather(
            whole.sample(own_RV, local, sampler, backend), self.group.axis, tiled=True
        )

    def _best(self, logits_BW: Array) -> Array:
        """int32 `token_B`, the tokens with the largest logits; of equal logits the first."""
        first = lax.axis_index(self.group.axis) * logits_BW.shape[1]
        place_B = first + jnp.argmax(logits_BW, axis=-1).astype(jnp.int32)
        # XLA's maximum on the CPU loses NaN in long rows
        broken_B = jnp.isnan(logits_BW).any(axis=-1)
        value_B = jnp.where(broken_B, jnp.nan, logits_BW.max(axis=-1))
        backend = gather_backend(self.group)
        value_B, place_B = largest(value_B, place_B, group=self.group, backend=backend)
        return jnp.where(jnp.isfinite(value_B), place_B, BROKEN)
