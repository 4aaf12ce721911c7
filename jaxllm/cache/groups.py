"""Cache groups: layers whose caches have arrays of one shape, and whose pages live equally long.
Imports no jax."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxllm.cache.layer import LayerCache, OwnCache, own_cache, owner_of


@dataclass(frozen=True, slots=True)
class Place:
    """Where the cache of a layer lies.

    Attributes:
        group: number of its cache group.
        index: of the layer among those whose caches lie in the group's arrays.
    """

    group: int
    index: int


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches lie in the same arrays. All groups have pages of as many tokens.

    Attributes:
        spec: what each of the layers keeps. Pages are released behind its window, which is as wide
            as the widest of the layers'; what a layer sees is its own.
        layers: numbers of the layers, ascending; () where a model keeps nothing in its pages.
    """

    spec: OwnCache
    layers: tuple[int, ...]

    @property
    def window(self) -> int | None:
        """Tokens behind which pages are released; None: they live as long as their request."""
        return self.spec.window

    def among(self, layers: range) -> tuple[int, ...]:
        """Those of its layers that are among these, of a stage say."""
        return tuple(layer for layer in self.layers if layer in layers)


def cache_groups(
    layers: Sequence[LayerCache], windows: Iterable[int | None]
) -> tuple[CacheGroup, ...]:
    """The groups of a model's layers, which see as far back as these `windows`.

    Those with pages stand first: those that keep all pages, then wide windows before narrow ones.
    Pages of a layer live as long as the farthest-seeing layer that reads them needs.
    """
    widest: dict[int, int | None] = {}
    for layer, window in enumerate(windows):
        owner = owner_of(layers, layer)
        widest[owner] = _wider(widest.get(owner, window), window)
    members: dict[OwnCache, list[int]] = {}
    for owner in sorted(widest):
        members.setdefault(own_cache(layers, owner).living(widest[owner]), []).append(owner)
    groups = (CacheGroup(spec, tuple(numbers)) for spec, numbers in members.items())
    return tuple(sorted(groups, key=_rank))


def effective_window(window: int | None, length: int) -> int | None:
    """The window, or None where a sequence of `length` tokens fits it."""
    if window is None or window >= length:
        return None
    return window


def merged(
    groups: Sequence[CacheGroup], length: int
) -> tuple[tuple[CacheGroup, ...], tuple[tuple[int, ...], ...]]:
    """The groups where sequences have at most `length` tokens, and the numbers of those that each
    one is made of: windows that are no shorter keep all pages."""
    members: dict[OwnCache, list[int]] = {}
    for number, group in enumerate(groups):
        spec = group.spec.living(effective_window(group.window, length))
        members.setdefault(spec, []).append(number)
    together = [
        (CacheGroup(spec, _union(groups[number] for number in numbers)), tuple(numbers))
        for spec, numbers in members.items()
    ]
    together.sort(key=lambda pair: _rank(pair[0]))
    return tuple(group for group, _ in together), tuple(numbers for _, numbers in together)


def _union(groups: Iterable[CacheGroup]) -> tuple[int, ...]:
    """The layers of all these groups, ascending."""
    return tuple(sorted(layer for group in groups for layer in group.layers))


def _wider(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return None
    return max(first, second)


def _rank(group: CacheGroup) -> tuple[bool, float]:
    distance = math.inf if group.window is None else group.window
    return not group.spec.has_pages, -distance


def layer_places(
    groups: Sequence[CacheGroup], layers: Sequence[LayerCache], stage: range
) -> tuple[Place, ...]:
    """The places of a stage's layers in the stage's own arrays, in their order. A model that caches
    nothing has none."""
    places = {
        layer: Place(number, index)
        for number, group in enumerate(groups)
        for index, layer in enumerate(group.among(stage))
    }
    owners = (owner_of(layers, layer) for layer in stage)
    return tuple(places[owner] for owner in owners if owner in places)
