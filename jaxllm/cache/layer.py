"""What one layer remembers of earlier tokens. Imports no jax.

`PagedKV` is the only form today. Latent caches, recurrent states and layers that read another
layer's cache become further types here, and `LayerCache` their union.
"""

from __future__ import annotations

from dataclasses import dataclass

# Name and shape of the checkpoint tensors with the scales of a layer's keys and of its values
type ScaleTensors = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of every token, in pages.

    Attributes:
        heads: the model's own KV heads; copies for tensor shards are not counted.
        key_dim: width of a key.
        value_dim: width of a value.
        window: tokens that a token sees, itself included; None sees all.
        scales: checkpoint tensors that scale 8-bit pages; None computes a scale per token and head.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    scales: ScaleTensors | None = None


type LayerCache = PagedKV
