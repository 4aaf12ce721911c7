"""Which of several engines gets a request: one that has its prefix cached, unless that one has too
much to do.

The front end hears what enters and leaves each engine's prefix cache with the results of its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from jaxllm.cache.events import DEVICE, HOST, AllBlocksCleared, BlockStored, KVEvent, shorts
from jaxllm.cache.prefix import PageHasher
from jaxllm.messages import GenerateRequest, PoolingRequest

MAX_PAGES = 2048  # of a prompt, that are looked up
MEMORIES = {DEVICE: 1, HOST: 2}
PAGES_AT_ONCE = 32  # hashed before it is known whether any is cached


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that takes requests.

    Attributes:
        cached: tokens of the prompt that its prefix cache holds.
        load: tokens of its requests in flight, prompts and answers, whether they wait or run.
        has_room: whether the request would run at once: a seat is free, and so is memory.
        pages: that its prefix cache holds.
    """

    cached: int
    load: int
    has_room: bool
    pages: int


def choose(candidates: Sequence[Candidate], slack: int) -> int:
    """The number of the candidate that gets the request: the one with the longest cached prefix,
    then with the least load, then with the emptiest cache.

    Two are passed over, so that a popular prefix starves nobody: one without room while another has
    some, and one whose load is above twice the least by more than `slack` tokens and the prefix
    that it has cached.
    """
    roomy = [candidate for candidate in candidates if candidate.has_room] or candidates
    most = 2 * min(candidate.load for candidate in roomy) + slack
    near = [candidate for candidate in roomy if candidate.load <= most + candidate.cached]
    return candidates.index(
        max(near, key=lambda candidate: (candidate.cached, -candidate.load, -candidate.pages))
    )


class CachedPages:
    """The pages that an engine can find, by the hashes that its events tell."""

    def __init__(self) -> None:
        self._memories: dict[int, int] = {}  # of each page, as sums of MEMORIES

    def __len__(self) -> int:
        return len(self._memories)

    def count_known(self, keys: Iterable[int]) -> int:
        """How many of the keys are known before the first that is not."""
        return len(list(takewhile(self._memories.__contains__, keys)))

    def follow(self, events: Sequence[KVEvent]) -> None:
        """Do as the cache did."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._memories.clear()
                continue
            memory = MEMORIES[event.medium]
            for key in event.block_hashes:
                others = self._memories.pop(key, 0) & ~memory
                if isinstance(event, BlockStored):
                    self._memories[key] = others | memory
                elif others:
                    self._memories[key] = others

    def clear(self) -> None:
        """The engine is another one, or gone."""
        self._memories.clear()


def cached_tokens(
    request: GenerateRequest | PoolingRequest, hasher: PageHasher, caches: Sequence[CachedPages]
) -> list[int]:
    """Tokens at the start of the prompt that each of the caches holds. Hashing ends where none of
    them knows the next page."""
    counts = [0] * len(caches)
    if request.params.prompt_logprobs is not None:  # such a prompt is computed whole
        return counts
    keys = request.prompt.keys
    size = hasher.page_size
    last = min((len(keys) - 1) // size, MAX_PAGES)
    hashes: list[bytes] = []
    root = hasher.root(request.cache_salt, None)
    while len(hashes) < last:
        first = len(hashes)
        end = min(first + PAGES_AT_ONCE, last)
        hasher.extend(hashes, keys[first * size : end * size], root)
        told = shorts(hashes[first:])
        for number, cache in enumerate(caches):
            if counts[number] == first:
                counts[number] += cache.count_known(told)
        if max(counts) < end:
            break
    return [pages * size for pages in counts]
