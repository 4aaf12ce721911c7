"""Pages of layers with a window: their reuse after release, and look-ups among them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.cache.groups import CacheGroup
from jaxllm.cache.layer import PagedKV
from jaxllm.cache.pool import Lifetime, PagePool
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.scheduling.kv_manager import KVCacheManager
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.startup.kv_requirements import KVRequirements
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.fake_device import EOS
from tests.engine.fake_loop import Loop, Setup

PAGE = 8
GROUPS = tuple(CacheGroup(PagedKV(1, 1, 1, window), ()) for window in (None, 12))


class Counting(PrefixIndex):
    """An index that counts look-ups."""

    finds = 0

    def find(self, key: bytes) -> int | None:
        self.finds += 1
        return super().find(key)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [EOS + 1 + rng.randrange(1000) for _ in range(length)]


def waiting(length: int) -> Request:
    return Request(
        id="w",
        index=0,
        prompt=Prompt(prompt(length)),
        params=SamplingParams(),
        seed=0,
        arrival=0.0,
        max_tokens=1,
    )


def windowed(windows: Sequence[int | None], pages: int, size: int = PAGE) -> KVCacheManager:
    return KVCacheManager(
        [PagePool(pages, size, Counting(size, b"test"), Lifetime(window)) for window in windows]
    )


def cached(request: Request | None) -> int:
    assert request is not None
    return request.num_cached_tokens


def test_who_was_refused_starts_when_a_prompt_has_given_back_what_its_chunks_needed() -> None:
    loop = Loop(Setup(page_size=PAGE, num_pages=32, windows=(60,), max_num_batched_tokens=128))
    loop.add(prompt(250), 200)
    loop.step()
    late = loop.add(prompt(56, seed=1), 60)
    assert late is not None
    while not late.num_scheduled_outputs:
        loop.step()
        assert loop.steps < 30, "most of the pool is free"
    loop.drain()
    assert not loop.scheduler.preemptions


@pytest.mark.parametrize("windows", [(12,), (None, 12)])
def test_a_long_prompt_leaves_others_what_they_have_cached(windows: tuple[int | None, ...]) -> None:
    loop = Loop(
        Setup(
            page_size=PAGE,
            num_pages=100,
            windows=windows,
            window_pages=20,
            max_num_batched_tokens=16,
        )
    )
    for tokens in (prompt(40), prompt(300, seed=2)):
        loop.add(tokens, 4)
        loop.drain()
    again = loop.add(prompt(40) + prompt(8, seed=9), 4)
    loop.drain()
    assert cached(again) == 40


def test_a_beginning_that_many_share_is_found_though_all_go_on_past_it() -> None:
    loop = Loop(
        Setup(
            page_size=PAGE, num_pages=100, windows=(12,), window_pages=40, max_num_batched_tokens=16
        )
    )
    loop.add(prompt(90, seed=3), 4)  # leaves no page blank
    loop.drain()
    for number in range(8):
        again = loop.add(prompt(40) + prompt(80, seed=10 + number), 4)
        loop.drain()
        assert cached(again) == (40 if number else 0)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 60),
    st.data(),
)
def test_the_longest_prefix_is_found_of_which_there_is_what_the_next_token_sees(
    windows: list[int], size: int, length: int, data: st.DataObject
) -> None:
    manager, request = windowed(windows, 64, size), waiting(length + 1)
    pages = length // size
    manager.prefixes.hash_pages(request, length + 1)
    there = [data.draw(st.sets(st.integers(0, pages))) for _ in windows]
    for pool, known in zip(manager.pools, there, strict=True):
        for i in sorted(known & set(range(pages))):
            assert pool.index is not None
            pool.index.register(request.hashes[i], *pool.allocate(1))
    seen = [
        [range(max(0, n * size - window + 1) // size, n) for n in range(pages + 1)]
        for window in windows
    ]
    expected = max(
        n
        for n in range(pages + 1)
        if all(known.issuperset(of[n]) for known, of in zip(there, seen, strict=True))
    )
    count, tables = manager.prefixes._indexed_prefix(request, None)
    assert count == expected
    for pool, table in zip(manager.pools, tables, strict=True):
        assert pool.index is not None
        assert table.resident == [
            pool.index.find(key) for key in request.hashes[table.out_of_window : count]
        ]


def test_looking_for_a_long_prompt_of_which_there_is_nothing_costs_a_look_up_a_window() -> None:
    manager, request = windowed([50 * PAGE, 20 * PAGE], 64), waiting(1000 * PAGE + 1)
    assert manager.prefixes._indexed_prefix(request, None)[0] == 0
    assert (
        sum(index.finds for index in manager.prefixes.indexes if isinstance(index, Counting)) <= 25
    )


def test_a_request_with_tables_of_some_kinds_only_is_an_error() -> None:
    manager, request = windowed([20, 10], 64), waiting(30)
    manager.release(request)
    manager.allocate(request, manager.lookup(request, None))
    request.tables = request.tables[:1]
    with pytest.raises(ValueError, match="shorter"):
        manager.release(request)


def test_short_requests_of_a_model_for_long_ones_run_at_once() -> None:
    need = KVRequirements((1, 1), PAGE, 16, 512, 32, GROUPS)
    pages = need.pages_in(192)
    setup = Setup(
        page_size=PAGE,
        num_pages=pages,
        windows=(None, 12),
        window_pages=need.group_pages(pages)[1],
        max_num_batched_tokens=32,
    )
    loop = Loop(replace(setup, max_num_seqs=16, max_model_len=512))
    for number in range(16):
        loop.add(prompt(20, seed=number), 20)
    most = 0
    while loop.scheduler.has_work:
        loop.step()
        most = max(most, loop.scheduler.running)
    assert most >= 12, "with pools for requests of 512 tokens alone it is 6"
    assert loop.add(prompt(400), 112) is not None
    loop.drain()


def test_groups_that_keep_all_pages_give_as_many_of_a_prefix() -> None:
    """Unlike heads may have pools of their own, and one of them may have evicted more."""
    manager = windowed([None, None], 16)
    writer = waiting(5 * PAGE)
    manager.allocate(writer, manager.lookup(writer, None))
    writer.computed = 5 * PAGE
    manager.register(writer, 0, 5 * PAGE)
    index = manager.prefixes.indexes[1]
    index.forget(writer.hashes[3:])
    reader = waiting(5 * PAGE)
    pages = manager.lookup(reader, None)
    assert [len(table.pages) for table in pages.tables] == [3, 3]
    assert (pages.kept, pages.fresh) == (3 * PAGE, [2, 2])
    manager.allocate(reader, pages)
    reader.status = Status.RUNNING
    manager.check([writer, reader])
