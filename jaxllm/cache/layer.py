"""What one layer remembers of earlier tokens. Imports no jax.

`LayerCache` is the union of the forms. What a form allows is asked of it: a refusal is the reason
for the operator, or None. Further forms become further types here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

# Name and shape of the checkpoint tensors with the scales of a layer's keys and of its values
type ScaleTensors = tuple[tuple[str, tuple[int, ...]], ...]


class Form:
    """A form of what a layer remembers; most have nothing to change."""

    def scaled(self, scales: ScaleTensors | None) -> Self:
        """The same with the checkpoint's own scales of 8-bit pages, where it has such pages."""
        return self

    def stored_at(self, width: int | None) -> Self:
        """The same with heads stored at this width, where they may be wider; None is their own."""
        return self

    def unrounded(self, reason: str | None) -> Self:
        """The same with keys that 8 bits cannot hold, for this reason; None: they can."""
        return self

    def living(self, window: int | None) -> Self:
        """What a cache group needs to know, whose pages are released behind this window."""
        return self


@dataclass(frozen=True)
class PagedKV(Form):
    """Keys and values of every token, in pages.

    Attributes:
        heads: the model's own KV heads; copies for tensor shards are not counted.
        key_dim: width of a key.
        value_dim: width of a value.
        window: tokens that a token sees, itself included; None sees all.
        scales: checkpoint tensors that scale 8-bit pages; None computes a scale per token and head.
        order: the checkpoint's order of the dimensions of a key, see `nn.heads.Heads`.
        width: width at which keys and values are stored; None is their own.
        rounding_refusal: why 8 bits cannot hold the keys; None where they can.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    scales: ScaleTensors | None = None
    order: tuple[int, ...] = ()
    width: int | None = None
    rounding_refusal: str | None = None
    rank: ClassVar[None] = None
    has_pages: ClassVar[bool] = True
    move_refusal: ClassVar[str | None] = None
    prefix_refusal: ClassVar[str | None] = None

    @property
    def plane_widths(self) -> tuple[int, ...]:
        """Widths of the planes of a page: that of keys, then that of values."""
        return self.width or self.key_dim, self.width or self.value_dim

    def stored_heads(self, shards: int) -> int:
        """Heads over all tensor shards; where there are fewer than shards, copies of each."""
        return self.heads * max(1, shards // self.heads)

    def scaled(self, scales: ScaleTensors | None) -> Self:
        return replace(self, scales=scales)

    def stored_at(self, width: int | None) -> Self:
        return replace(self, width=None if width == self.key_dim else width)

    def unrounded(self, reason: str | None) -> Self:
        return replace(self, rounding_refusal=reason)

    def living(self, window: int | None) -> Self:
        return replace(self, window=window, scales=None, order=())


@dataclass(frozen=True)
class LatentKV(Form):
    """One entry for every token, in pages: a latent of which all heads make keys and values, then
    a rotary key, which they share. To the pages it is one key head without values.

    Attributes:
        rank: width of the latent.
        rope: width of the rotary key.
    """

    rank: int
    rope: int
    heads: ClassVar[int] = 1
    window: ClassVar[None] = None
    scales: ClassVar[None] = None
    order: ClassVar[tuple[int, ...]] = ()
    width: ClassVar[None] = None
    has_pages: ClassVar[bool] = True
    rounding_refusal: ClassVar[str] = "latents are kept in the type that the model computes in"
    move_refusal: ClassVar[str | None] = None
    prefix_refusal: ClassVar[str | None] = None

    @property
    def key_dim(self) -> int:
        """Width of an entry."""
        return self.rank + self.rope

    @property
    def plane_widths(self) -> tuple[int, ...]:
        """As of `PagedKV`: entries are the only plane."""
        return (self.key_dim,)

    def stored_heads(self, shards: int) -> int:
        """As of `PagedKV`: every shard has all entries."""
        return shards


@dataclass(frozen=True)
class SharedKV(Form):
    """Keys and values of an earlier layer, which this one reads and does not write.

    Attributes:
        layer: the number of that layer.
        window: tokens that a token sees, itself included; None sees all.
    """

    layer: int
    window: int | None = None
    scales: ClassVar[None] = None
    width: ClassVar[None] = None
    rounding_refusal: ClassVar[None] = None
    move_refusal: ClassVar[None] = None
    prefix_refusal: ClassVar[None] = None


@dataclass(frozen=True)
class RecurrentState(Form):
    """One state for every running request, whatever its length. It has no pages.

    A state has seen each token once. So no request starts from what another one has computed, and
    one that was preempted starts anew.

    Attributes:
        shapes: of the state's arrays, for one request. Tensor shards divide the first axis of each.
        dtype: of the arrays.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    window: ClassVar[None] = None
    scales: ClassVar[None] = None
    width: ClassVar[None] = None
    has_pages: ClassVar[bool] = False
    rounding_refusal: ClassVar[None] = None  # 8 bits are for pages
    move_refusal: ClassVar[str] = (
        "layers with a recurrent state keep it on the device alone, and it has no pages"
    )
    prefix_refusal: ClassVar[str] = (
        "layers with a recurrent state must see every token of a request themselves"
    )


# What the arrays of a cache group hold for each of its layers
type OwnCache = PagedKV | LatentKV | RecurrentState
type AttentionCache = PagedKV | LatentKV
type LayerCache = OwnCache | SharedKV


def owner_of(layers: Sequence[LayerCache], layer: int) -> int:
    """The layer whose cache a layer reads: mostly itself."""
    cache = layers[layer]
    return cache.layer if isinstance(cache, SharedKV) else layer


def own_cache(layers: Sequence[LayerCache], layer: int) -> OwnCache:
    """What the layer keeps that this one reads. Raises ValueError where that keeps nothing
    itself."""
    cache = layers[owner_of(layers, layer)]
    if isinstance(cache, SharedKV):
        raise ValueError(f"layer {layer} reads a layer that has no cache of its own")
    return cache


def attention_cache(layers: Sequence[LayerCache], layer: int | None = None) -> AttentionCache:
    """What a layer attends to; None: the first that attends. Raises ValueError for one that does
    not attend."""
    numbers = range(len(layers)) if layer is None else [layer]
    for number in numbers:
        cache = own_cache(layers, number)
        if not isinstance(cache, RecurrentState):
            return cache
    if layer is None:
        raise ValueError("the model has no layer that attends")
    raise ValueError(f"layer {layer} does not attend")
