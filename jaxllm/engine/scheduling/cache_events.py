"""Tells listeners of the prefix cache which pages of a request can be found now. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.scheduling.request import Request


def tell_stored(index: PrefixIndex, request: Request, first: int, new: Sequence[bool]) -> None:
    """Of the request's pages from number `first` on, these are `new` in `index`, which has
    `events`."""
    assert index.events is not None
    size, at = index.page_size, first
    for stored, run in groupby(new):
        start, at = at, at + len(list(run))
        if not stored:
            continue
        extra = None
        if start == 0 and (request.cache_salt is not None or request.adapter is not None):
            extra = index.root(request.cache_salt, request.adapter)
        index.events.stored(
            request.hashes[start:at],
            request.hashes[start - 1] if start else None,
            request.tokens(start * size, at * size),
            extra,
        )
