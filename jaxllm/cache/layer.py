"""What one layer remembers of earlier tokens. Imports no jax.

`LayerCache` is the union of the forms. Recurrent states and layers that read another layer's cache
become further types here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
    pools: ClassVar[int] = 2  # of keys and of values


@dataclass(frozen=True)
class LatentKV:
    """One entry for every token, in pages: a latent of which all heads make keys and values, then
    a key that turned, which they share. To the pool it is one key head without values.

    Attributes:
        rank: width of the latent.
        rope: width of the turned key.
    """

    rank: int
    rope: int
    heads: ClassVar[int] = 1
    window: ClassVar[None] = None
    scales: ClassVar[None] = None
    pools: ClassVar[int] = 1

    @property
    def key_dim(self) -> int:
        """Width of an entry."""
        return self.rank + self.rope


type LayerCache = PagedKV | LatentKV
