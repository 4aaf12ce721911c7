"""How much of prompts is found in the prefix cache, and why the rest of one is not. Imports no
jax."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.scheduling.prefix_lookup import PrefixLookup
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
        here = None
        if self._indexes[0].find(plain) is not None:
            here = (None, None)
        salt, adapter = here or self._starts.get(plain, (request.cache_salt, request.adapter))
        if adapter != request.adapter:
            return "adapter"
        if salt != request.cache_salt:
            return "salt"
        return "new_text"

    def _plain_start(self, request: Request) -> bytes:
        """The hash that the request's first page would have without salt and adapter."""
        if request.cache_salt is None and request.adapter is None:
            return request.hashes[0]
        index = self._indexes[0]
        hashes = list[bytes]()
        index.extend(hashes, request.keys(0, index.page_size))
        return hashes[0]


class PrefixCounts:
    """Counts what requests find. Prompts that must be computed, to be scored, do not count, nor
    those of which a request finds its own pages alone.

    Attributes:
        misses: why the rest was not found.
    """

    def __init__(self, prefixes: PrefixLookup):
        self._prefixes = prefixes
        self.misses = PrefixMisses(prefixes.indexes)

    def note_found(self, request: Request) -> None:
        """A request that was given pages has found its `kept` tokens."""
        if not request.has_run and self._counts(request):
            page = request.kept // self._prefixes.page_size
            request.prefix_miss = self.misses.explain(request, page)

    def note_first_run(self, request: Request) -> None:
        """Count tokens looked up and found when a request first runs, and never before: pages that
        it waits for may not come. Of choices only the first counts, since the others may find its
        pages."""
        request.has_run = True
        sharing = request.sharing
        if sharing is not None and sharing.cached_tokens is not None:
            request.num_cached_tokens = sharing.cached_tokens
            request.prefix_miss = None
            return
        if self._counts(request):
            request.num_cached_tokens = request.computed
            self._prefixes.indexes[0].count(request.num_tokens, request.computed)
        if sharing is not None:
            sharing.cached_tokens = request.num_cached_tokens

    def _counts(self, request: Request) -> bool:
        """Whether what the request finds counts."""
        scored = request.scored >= request.score_end
        return bool(self._prefixes.indexes) and self._prefixes.shared and scored
