"""Tells listeners of the prefix cache which pages can be found now. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from jaxllm.cache.events import KVEventBatch, KVEvents
from jaxllm.cache.host import HostTier
from jaxllm.cache.pool import PagePool
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.scheduling.request import Request


class PrefixEvents:
    """What becomes findable and what no longer is: pages of the layers that see furthest, and those
    in host memory. Nothing is collected before somebody listens."""

    def __init__(self, pools: Sequence[PagePool]):
        windows = [pool.lifetime.window for pool in pools]
        self._index = pools[windows.index(None) if None in windows else 0].index
        self._host: HostTier | None = None
        self._events: KVEvents | None = None

    @property
    def start(self) -> bytes:
        """Where the hashes that events tell begin (`PageHasher`)."""
        assert self._index is not None, "nobody could listen"
        return self._index.start

    def include(self, host: HostTier) -> None:
        """Tell of pages in host memory too."""
        self._host = host
        host.events = self._events

    def listen(self, listener: Callable[[KVEventBatch], None]) -> None:
        """Call `listener` after each step from now on. An exception that it raises fails the step.
        Raises ValueError without a prefix index."""
        if self._events is None:
            if self._index is None:
                raise ValueError("nothing can be found without prefix caching; enable it")
            self._events = self._index.events = KVEvents(self._index.page_size)
            if self._host is not None:
                self._host.events = self._events
        self._events.listeners.append(listener)

    def flush(self) -> None:
        """Give what happened since the last call to the listeners, if there are any."""
        if self._events is not None:
            self._events.flush()


def tell_stored(index: PrefixIndex, request: Request, first: int, new: Sequence[bool]) -> None:
    """Of the request's pages from number `first` on, these are `new` in `index`, which has
    `events`."""
    assert index.events is not None
    size = index.page_size
    end = first
    for stored, run in groupby(new):
        start = end
        end += len(list(run))
        if not stored:
            continue
        extra = None
        if start == 0 and (request.cache_salt is not None or request.adapter is not None):
            extra = index.root(request.cache_salt, request.adapter)
        index.events.stored(
            request.hashes[start:end],
            request.hashes[start - 1] if start else None,
            request.tokens(start * size, end * size),
            extra,
        )
