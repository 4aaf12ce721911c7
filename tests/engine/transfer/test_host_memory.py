"""Host memory for pages between engines: room for those on their way, and what becomes of it when a
request is aborted."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxllm.cache.transfer import Page
from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime import page_swapper
from jaxllm.engine.transfer.fetcher import THREADS
from jaxllm.kv_transfer.client import PageClient
from jaxllm.mesh import PINNED
from tests.engine.conftest import collect, tokens_of
from tests.engine.transfer.conftest import PROMPT, close, continued, request, share

PAGE_BYTES = 2048


def test_pages_on_their_way_never_take_more_host_memory_than_there_is(
    make, prefill, alone, monkeypatch
):
    engine = make("kv_consumer", kv_offloading_size=25 * 4096 / 2**30)
    offload, swapper = engine.scheduler.offload, engine.runner.swapper
    prompts = [[first, *PROMPT] for first in range(3 * offload.host.num_pages // 7)]
    most = 0
    made, coming = swapper.made, 0

    def counted(parts: Any) -> Any:
        nonlocal most, coming
        coming += 1
        most = max(most, len(swapper._kept) + coming)
        return made(parts)

    monkeypatch.setattr(swapper, "made", counted)
    fetched = 0
    for prompt in prompts:
        offer, coming = share(prefill, prompt), 0
        engine.scheduler.kv_manager.prefixes.indexes[0].clear()  # but host memory keeps its pages
        deltas = collect(engine, [request(prompt, page_offer=offer)])
        assert deltas[-1].num_cached_tokens >= 56
        fetched += coming
        engine.scheduler.check()
    assert fetched > offload.host.num_pages and most <= offload.host.num_pages + 7
    close(engine)


def test_room_for_pages_is_not_that_of_the_pages_before_them(make, prefill):
    engine = make("kv_consumer", kv_offloading_size=8 * 2048 / 2**30)
    host, index = engine.scheduler.offload.host, engine.scheduler.kv_manager.prefixes.indexes[0]
    collect(engine, [request(PROMPT[:33], page_offer=share(prefill, PROMPT[:33]))])
    index.clear()  # but host memory keeps four pages
    long = [*PROMPT, *PROMPT[:20]]
    deltas = collect(engine, [request(long, page_offer=share(prefill, long))])
    assert (host.num_pages, deltas[-1].num_cached_tokens) == (8, 8 * 8)
    close(engine)


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(prefill, decode, monkeypatch):
    offer, go_on = share(prefill, PROMPT), threading.Event()
    fetch = PageClient.fetch

    def late(self: PageClient, *arguments: Any) -> Iterator[np.ndarray]:
        go_on.wait(20)
        yield from fetch(self, *arguments)

    monkeypatch.setattr(PageClient, "fetch", late)
    decode.reset_prefix_cache()
    decode.add(request(PROMPT, page_offer=offer))
    decode.abort("r")
    go_on.set()
    assert [delta.finish_reason for delta in collect(decode, [])] == ["abort"]
    decode.scheduler.check()
    assert decode.stats().waiting == 0 and not decode.has_work


def test_pages_that_are_on_the_shelf_take_no_pinned_memory_any_more(prefill, monkeypatch):
    taken, take_out = list[weakref.ref[Any]](), prefill.runner.take_out

    def noted(pages: list[int]) -> list[Page]:
        found = take_out(pages)
        taken.extend(weakref.ref(array) for page in found for array in page)
        return found

    monkeypatch.setattr(prefill.runner, "take_out", noted)
    prefill.reset_prefix_cache()
    share(prefill, PROMPT[::-1])
    until = time.monotonic() + 20
    while any(array() is not None for array in taken) and time.monotonic() < until:
        prefill.stats()  # looks for copies that have arrived
        time.sleep(0.01)
    assert taken and all(array() is None for array in taken)


class Held:
    """Fetches that wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._go_on, fetch = threading.Event(), PageClient.fetch

        def late(client: PageClient, *arguments: Any) -> Iterator[np.ndarray]:
            assert self._go_on.wait(20)
            yield from fetch(client, *arguments)

        monkeypatch.setattr(PageClient, "fetch", late)

    def let_go(self, engine: Engine) -> None:
        """Let the engine's fetches end."""
        self._go_on.set()
        assert engine.transfer.fetcher is not None
        wait(engine.transfer.fetcher.pending, 20)


def aborted(engine: Engine, offer: dict[str, Any]) -> None:
    """Begin a request that waits for pages, and abort it."""
    engine.reset_prefix_cache()
    engine.add(request(PROMPT, page_offer=offer))
    assert engine.pending.unsettled
    engine.abort("r")
    assert [delta.finish_reason for delta in collect(engine, [])] == ["abort"]


def test_room_for_pages_of_an_aborted_request_goes_to_the_next_one(
    make, prefill, alone, monkeypatch
):
    engine, offer = make("kv_consumer", kv_offloading_size=8 * 2048 / 2**30), share(prefill, PROMPT)
    assert engine.scheduler.offload.host.num_pages == 8
    held = Held(monkeypatch)
    aborted(engine, offer)
    held.let_go(engine)
    last = continued(engine, PROMPT, offer)
    assert last.token_ids == alone and last.num_cached_tokens == 56
    close(engine)


def test_room_for_pages_of_an_aborted_request_is_free_while_others_run(
    prefill, decode, monkeypatch
):
    offer, held, host = share(prefill, PROMPT), Held(monkeypatch), decode.scheduler.offload.host
    aborted(decode, offer)
    assert len(host.promised) == 7
    held.let_go(decode)
    collect(decode, [request(PROMPT[:9])])
    assert host.promised == set() and host.used == 0


def test_an_id_may_be_used_again_while_pages_of_an_aborted_request_are_on_their_way(
    prefill, decode, alone, monkeypatch
):
    offer, held = share(prefill, PROMPT), Held(monkeypatch)
    aborted(decode, offer)
    decode.add(request(PROMPT, page_offer=offer))
    held.let_go(decode)
    assert tokens_of(collect(decode, []), "r") == alone


def test_an_engine_sleeps_and_wakes_while_pages_of_an_aborted_request_are_on_their_way(
    prefill, decode, alone, monkeypatch
):
    offer, held = share(prefill, PROMPT), Held(monkeypatch)
    aborted(decode, offer)
    decode.sleeper.sleep(1)
    decode.sleeper.wake_up()
    held.let_go(decode)
    last = continued(decode, PROMPT, offer)
    assert last.token_ids == alone and last.num_cached_tokens == 56


def test_pages_of_an_aborted_request_are_not_asked_for(make, prefill, monkeypatch):
    engine, offer = make("kv_consumer"), share(prefill, PROMPT)
    fetcher, go_on, asked = engine.transfer.fetcher, threading.Event(), list[int]()

    def late(self: PageClient, address: Any, keys: Any, seconds: float) -> Iterator[np.ndarray]:
        asked.append(len(keys))
        go_on.wait(20)
        yield from ()

    monkeypatch.setattr(PageClient, "fetch", late)
    for n in range(THREADS + 2):
        engine.add(replace(request([n, *PROMPT[:20]], page_offer=offer), id=str(n)))
    for n in range(THREADS + 2):
        engine.abort(str(n))
    fetches = fetcher.pending
    go_on.set()
    wait(fetches)
    assert 0 < len(asked) <= THREADS
    assert {delta.finish_reason for delta in collect(engine, [])} == {"abort"}
    close(engine)


def test_pages_that_a_failed_step_did_not_take_out_are_shared_by_the_next_request(
    prefill, decode, monkeypatch
):
    prompt = [91, *PROMPT]

    def fail(pages: list[int]) -> Any:
        raise RuntimeError("as the test wants")

    with monkeypatch.context() as patch:
        patch.setattr(prefill.runner, "take_out", fail)
        with pytest.raises(RuntimeError, match="as the test wants"):
            share(prefill, prompt)
    assert continued(decode, prompt, share(prefill, prompt)).num_cached_tokens == 56


def test_of_a_prompt_that_is_longer_than_the_shelf_the_first_pages_are_shared(make, decode, alone):
    engine = make("kv_producer", buffer=4 * PAGE_BYTES)
    assert engine.transfer.exporter.shelf.capacity == 4
    last = continued(decode, PROMPT, share(engine, PROMPT))
    assert (last.token_ids, last.num_cached_tokens) == (alone, 4 * 8)
    close(engine)


def test_pages_that_could_not_be_copied_are_copied_for_the_next_request(
    prefill, decode, monkeypatch, caplog
):
    prompt, exporter = [92, *PROMPT], prefill.transfer.exporter

    def full(*_: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(exporter.shelf, "put", full)
        assert continued(decode, prompt, share(prefill, prompt)).num_cached_tokens == 0
    assert "could not be copied: no room" in caplog.text
    assert continued(decode, prompt, share(prefill, prompt)).num_cached_tokens == 56


def test_pages_in_pinned_memory_are_written_in_place_and_again_for_others(
    make, make_engine, prefill, monkeypatch
):
    monkeypatch.setattr(page_swapper, "far_memory", lambda platform: PINNED)
    engine = make("kv_consumer", kv_offloading_size=9 * 2048 / 2**30)
    host, swapper = engine.scheduler.offload.host, engine.runner.swapper
    prompts = [[first, *PROMPT] for first in range(6)]
    whole = make_engine()
    wanted = [tokens_of(collect(whole, [request(prompt)]), "r") for prompt in prompts]
    assert (host.num_pages, len(swapper._blank)) == (9, 9)
    memory = {page[0].unsafe_buffer_pointer() for page in swapper._blank}
    assert len(memory) == 9, "each page is memory of its own"
    for tokens, prompt in zip(wanted, prompts, strict=True):
        offer = share(prefill, prompt)
        engine.scheduler.kv_manager.prefixes.indexes[0].clear()  # but host memory keeps its pages
        deltas = collect(engine, [request(prompt, page_offer=offer)])
        assert tokens_of(deltas, "r") == tokens and deltas[-1].num_cached_tokens == 56
        held = [page[0] for page in (*swapper._blank, *swapper._kept.values())]
        assert {array.unsafe_buffer_pointer() for array in held} == memory, "no page is new"
        engine.scheduler.check()
    close(engine)


def test_pages_that_leave_the_device_take_the_memory_of_blank_ones(make, prefill, monkeypatch):
    monkeypatch.setattr(page_swapper, "far_memory", lambda platform: PINNED)
    engine = make("kv_consumer", kv_offloading_size=9 * 2048 / 2**30, num_gpu_blocks_override=16)
    swapper = engine.runner.swapper
    for first in range(4):
        collect(engine, [request([first, *PROMPT])])  # drives the pages of the one before out
        assert len(swapper._blank) + len(swapper._kept) <= 9
    assert swapper._kept, "some have left"
    close(engine)


def test_pages_that_nobody_waits_for_any_more_leave_their_memory_to_others(
    make, prefill, monkeypatch
):
    monkeypatch.setattr(page_swapper, "far_memory", lambda platform: PINNED)
    engine = make("kv_consumer", kv_offloading_size=9 * 2048 / 2**30)
    swapper, offer = engine.runner.swapper, share(prefill, PROMPT)
    engine.add(request(PROMPT, page_offer=offer))
    wait(engine.transfer.fetcher.pending, 20)
    engine.reset_prefix_cache()
    deltas = collect(engine, [])
    assert deltas[-1].num_cached_tokens == 0
    assert len(swapper._blank) + len(swapper._kept) == 9
    close(engine)


def test_memory_that_is_not_pinned_is_not_kept_for_later(make, prefill):
    engine = make("kv_consumer", kv_offloading_size=9 * 2048 / 2**30)
    for first in range(3):
        prompt = [first, *PROMPT]
        engine.scheduler.kv_manager.prefixes.indexes[0].clear()
        collect(engine, [request(prompt, page_offer=share(prefill, prompt))])
    assert not engine.runner.swapper._blank
    close(engine)
