"""Which engine gets a request: the rule, and what is known of each engine's cache."""

from __future__ import annotations

import itertools
from dataclasses import replace

from jaxllm.cache.events import DEVICE, HOST, KVEvents
from jaxllm.cache.prefix import PageHasher, PrefixIndex
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from jaxllm.server.engine.routing import CachedPages, Candidate, cached_tokens, choose

PAGE = 4


def candidate(cached: int = 0, load: int = 0, has_room: bool = True, pages: int = 0) -> Candidate:
    return Candidate(cached, load, has_room, pages)


def request(tokens: list[int], salt: str | None = None, scored: bool = False) -> GenerateRequest:
    params = SamplingParams(prompt_logprobs=1 if scored else None)
    return GenerateRequest(id="r", prompt=Prompt(tokens), params=params, cache_salt=salt)


def test_the_longest_prefix_wins_then_the_least_load_then_the_emptiest_cache() -> None:
    assert choose([candidate(16, 0), candidate(32, 50)], 100) == 1
    assert choose([candidate(32, 60), candidate(32, 50)], 100) == 1
    assert choose([candidate(0, 50, pages=9), candidate(0, 50, pages=3)], 100) == 1
    assert choose([candidate(), candidate()], 100) == 0


def test_a_busy_engine_keeps_its_prefix_up_to_a_bound_and_no_further() -> None:
    idle = candidate()
    assert choose([candidate(32, 132), idle], 100) == 0
    assert choose([candidate(32, 133), idle], 100) == 1
    assert choose([candidate(32, 2132), candidate(0, 1000)], 100) == 0
    assert choose([candidate(32, 2133), candidate(0, 1000)], 100) == 1


def test_a_prefix_is_worth_its_own_length_of_load() -> None:
    assert choose([candidate(100_000, 100_100), candidate()], 100) == 0


def test_no_request_waits_for_room_while_another_engine_has_some() -> None:
    full = candidate(10_000, 50, has_room=False)
    assert choose([full, candidate(0, 60)], 100) == 1
    assert choose([full, candidate(0, 60, has_room=False)], 100) == 0


def test_a_prefix_that_all_requests_share_starves_no_engine() -> None:
    load = [0, 0, 0]
    for _ in range(900):  # only the first engine has it, and nobody learns it
        at = choose([candidate(64 if i == 0 else 0, load[i]) for i in range(3)], 1000)
        load[at] += 100
    assert max(load) <= 2 * min(load) + 1000 + 64 + 100


def told(index: PrefixIndex, caches: CachedPages, keys: list[bytes], medium: str = DEVICE) -> None:
    """Index and cache get these pages."""
    events = KVEvents(PAGE)
    events.listeners.append(lambda batch: caches.follow(batch.events))
    events.stored(keys, None, [], medium=medium)
    events.flush()
    for page, key in enumerate(keys):
        index.register(key, page)


def test_what_is_known_of_a_cache_is_what_the_cache_finds() -> None:
    index, cache = PrefixIndex(PAGE, b"model"), CachedPages()
    hasher = PageHasher(PAGE, index.start)
    tokens, keys = list(range(90)), []
    index.extend(keys, tokens, index.root("salt", None))
    told(index, cache, keys[:20])
    for length, salt in itertools.product((1, 4, 5, 79, 80, 81, 90), ("salt", None)):
        prompt, own = request(tokens[:length], salt), []
        index.extend(own, prompt.prompt.tokens, index.root(salt, None))
        pages = len(index.match(own, (length - 1) // PAGE))
        assert cached_tokens(prompt, hasher, [CachedPages(), cache]) == [0, pages * PAGE]


def test_prompts_of_equal_tokens_are_told_apart_by_their_keys() -> None:
    index = PrefixIndex(PAGE, b"model")
    cache = CachedPages()
    hasher = PageHasher(PAGE, index.start)
    tokens = list(range(90))
    image = [*tokens[:30], -1, *tokens[31:]]
    hashes: list[bytes] = []
    index.extend(hashes, image)
    told(index, cache, hashes)
    for keys, cached in ((None, 28), (image, 88)):
        similar = replace(request(tokens), prompt=Prompt(tokens, keys))
        assert cached_tokens(similar, hasher, [cache]) == [cached]


def test_long_prompts_are_followed_to_the_end_of_the_longest_prefix() -> None:
    index, short, long = PrefixIndex(PAGE, b"model"), CachedPages(), CachedPages()
    tokens, keys = list(range(1000)), []
    index.extend(keys, tokens)
    told(index, short, keys[:40])
    told(index, long, keys[:200])
    hasher = PageHasher(PAGE, index.start)
    assert cached_tokens(request(tokens), hasher, [short, long]) == [160, 800]
    assert cached_tokens(request(tokens, scored=True), hasher, [short, long]) == [0, 0]


def test_a_page_is_known_until_it_has_left_every_memory() -> None:
    cache, events = CachedPages(), KVEvents(PAGE)
    events.listeners.append(lambda batch: cache.follow(batch.events))
    key, number = b"\0" * 31 + b"\7", 7
    for happens, known in (
        (lambda: events.stored([key], None, []), True),
        (lambda: events.stored([key], None, [], medium=HOST), True),
        (lambda: events.removed(key), True),
        (lambda: events.removed(key, HOST), False),
        (lambda: events.stored([key], None, []), True),
        (events.cleared, False),
    ):
        happens()
        events.flush()
        assert (cache.count_known([number]), len(cache)) == (known, known)
