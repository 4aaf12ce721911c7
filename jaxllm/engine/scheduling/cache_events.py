"""Tells listeners of the prefix cache which pages of a request can be found now. Imports no jax."""

from __future__ import annotations

from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.scheduling.request import Request


def tell_stored(index: PrefixIndex, request: Request, i: int) -> None:
    """Page `i` of the request has entered `index`, which has `events`."""
    assert index.events is not None
    parent = request.hashes[i - 1] if i else None
    tokens = request.tokens(i * index.page_size, (i + 1) * index.page_size)
    extra = None
    if parent is None and (request.cache_salt is not None or request.adapter is not None):
        extra = index.root(request.cache_salt, request.adapter)
    index.events.stored(request.hashes[i], parent, tokens, extra)
