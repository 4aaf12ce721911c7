"""Why the rest of an admitted prompt was not found in the prefix cache. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.scheduling.request import Request

MAX_STARTS = 4096  # first pages that are remembered with their salt and adapter


class PrefixMisses:
    """Explains misses, out of what the indexes hold and have evicted. The reasons are
    `messages.PREFIX_MISSES`."""

    def __init__(self, indexes: Sequence[PrefixIndex]):
        self._indexes = indexes
        # Salt and adapter by the hash that a first page would have without them, newest last
        self._starts: dict[bytes, tuple[str | None, bytes | None]] = {}

    def note_start(self, request: Request) -> None:
        """The first page of a request can be found, by requests of its salt and adapter alone."""
        if request.cache_salt is not None or request.adapter is not None:
            plain = self._plain_start(request)
            self._starts.pop(plain, None)
            self._starts[plain] = request.cache_salt, request.adapter
            if len(self._starts) > MAX_STARTS:
                del self._starts[next(iter(self._starts))]

    def explain(self, request: Request, found: int) -> str | None:
        """Why page `found` of the request, the first that was not found, was not; None when all
        that could be found was."""
        size = self._indexes[0].page_size
        if found >= min(len(request.hashes), (request.num_tokens - 1) // size):
            return None
        key = request.hashes[found]
        # A page that is there was of no use without others, which are not
        if any(index.find(key) is not None or index.was_evicted(key) for index in self._indexes):
            return "evicted"
        if found > 0:
            return "new_text"
        plain = self._plain_start(request)
        here = None if self._indexes[0].find(plain) is None else (None, None)
        salt, adapter = here or self._starts.get(plain, (request.cache_salt, request.adapter))
        if adapter != request.adapter:
            return "adapter"
        return "salt" if salt != request.cache_salt else "new_text"

    def _plain_start(self, request: Request) -> bytes:
        """The hash that the request's first page would have without salt and adapter."""
        if request.cache_salt is None and request.adapter is None:
            return request.hashes[0]
        index, hashes = self._indexes[0], list[bytes]()
        index.extend(hashes, request.keys(0, index.page_size))
        return hashes[0]
