"""Queries of latent attention, and the up-projections that turn latents into heads."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UpProjections:
    """What makes keys and values of N heads of a latent of V numbers.

    Attributes:
        keys_NEV: To the part of a head's key that does not turn, E numbers.
        values_NFV: To a head's value, F numbers.
    """

    keys_NEV: Array
    values_NFV: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentRows:
    """What latent attention gets of T tokens.

    Attributes:
        q_TNH: Queries: E numbers that meet a key of the latent, then those that turned.
        entry_TW: What is kept of a token: the latent, then the turned key, which all heads share.
        up: The up-projections.
    """

    q_TNH: Array
    entry_TW: Array
    up: UpProjections


def absorbed(q_TNH: Array, up: UpProjections) -> Array:
    """Queries that meet entries, `q_TNW`: multiplied by the up-projection of keys where they do
    not turn."""
    plain = up.keys_NEV.shape[1]
    q_TNE = q_TNH[..., :plain]
    turned = q_TNH[..., plain:]
    q_TNV = jnp.einsum("tne,nev->tnv", q_TNE, up.keys_NEV, precision=_precision(q_TNH))
    return jnp.concatenate([q_TNV, turned], axis=-1)


def projected(o_TNV: Array, up: UpProjections) -> Array:
    """Outputs of heads `o_TNF` of sums of latents."""
    return jnp.einsum("tnv,nfv->tnf", o_TNV, up.values_NFV, precision=_precision(o_TNV))


def _precision(x: Array) -> lax.Precision | None:
    # Some back ends round float32 factors otherwise
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
