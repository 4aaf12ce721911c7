"""A prompt computed by one engine and continued by another gives the tokens of one engine."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxllm.cache.transfer import Page
from jaxllm.config import ConfigError
from jaxllm.engine.engine import Engine
from jaxllm.kv_transfer import ring
from jaxllm.kv_transfer.client import PageClient
from jaxllm.messages import GenerateRequest, RequestError, TextDelta
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect, tokens_of
from tests.engine.fake_host import Optimist

MakeEngine = Callable[..., Engine]
PROMPT = [(7 * i) % 90 + 1 for i in range(61)]  # seven whole pages of 8, and 5 tokens
PREFILL = SamplingParams(temperature=0, max_tokens=1, min_tokens=1)
DECODE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text("a key of two engines")
    return str(path)


@pytest.fixture(scope="module", autouse=True)
def two_slots() -> Iterator[None]:
    """Each page takes the memory of the one before the last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "SIZE", 1)
        yield


@pytest.fixture(scope="module")
def make(make_engine: MakeEngine, key_file: str) -> MakeEngine:
    def make(role: str, seconds: float = 20.0, **overrides: Any) -> Engine:
        extra = {"key_file": key_file, "timeout_seconds": seconds}
        config = {"kv_role": role, "kv_port": 0, "kv_buffer_size": 1 << 22}
        config |= {"kv_connector_extra_config": extra}
        return make_engine(kv_transfer_config=config, **{"kv_offloading_size": 0.001} | overrides)

    return make


@pytest.fixture(scope="module")
def prefill(make: MakeEngine) -> Iterator[Engine]:
    yield (engine := make("kv_producer"))
    close(engine)


@pytest.fixture(scope="module")
def decode(make: MakeEngine) -> Iterator[Engine]:
    yield (engine := make("kv_consumer"))
    close(engine)


@pytest.fixture(scope="module")
def alone(make_engine: MakeEngine) -> list[int]:
    """Tokens of one engine without transfers."""
    engine = make_engine(num_gpu_blocks_override=40)
    return tokens_of(collect(engine, [request(PROMPT)]), "r")


def close(engine: Engine) -> None:
    assert engine._unscheduled._transfer is not None
    engine._unscheduled._transfer.close()


def request(prompt: list[int], **more: Any) -> GenerateRequest:
    return GenerateRequest(id="r", prompt_token_ids=prompt, **({"params": DECODE} | more))


def share(engine: Engine, prompt: list[int], **more: Any) -> dict[str, Any]:
    """The prefill leg."""
    collect(engine, [request(prompt, params=PREFILL, shares_pages=True, **more)])
    engine.scheduler.check()
    assert engine.resolved.page_offer is not None
    return engine.resolved.page_offer


def continued(engine: Engine, prompt: list[int], offer: dict[str, Any], **more: Any) -> TextDelta:
    """The last delta of the decode leg, with all its tokens; the engine's prefix cache is empty
    before."""
    engine.reset_prefix_cache()
    deltas = collect(engine, [request(prompt, page_offer=offer, **more)])
    engine.scheduler.check()
    deltas[-1].token_ids = tokens_of(deltas, "r")
    return deltas[-1]


def test_tokens_are_those_of_one_engine_and_whole_pages_are_not_computed_again(
    prefill, decode, alone
):
    offer = share(prefill, PROMPT)
    for _ in range(2):
        last = continued(decode, PROMPT, offer)
        assert last.token_ids == alone and last.num_cached_tokens == 56
    assert decode.stats().free_pages == decode.stats().num_pages
    # What is here already is not fetched
    again = collect(decode, [request(PROMPT, page_offer=offer)])
    assert tokens_of(again, "r") == alone and decode._unscheduled.waiting == 0


def test_pages_on_their_way_never_take_more_host_memory_than_there_is(
    make, prefill, alone, monkeypatch
):
    engine = make("kv_consumer", kv_offloading_size=25 * 4096 / 2**30)
    offload, swapper = engine.scheduler.offload, engine.runner.swapper
    prompts = [[first, *PROMPT] for first in range(3 * offload.host.num_pages // 7)]
    fetcher, most = engine._unscheduled._transfer.fetcher, 0
    keep, coming = fetcher._keep, 0

    def counted(page: np.ndarray) -> Any:
        nonlocal most, coming
        coming += 1
        most = max(most, len(swapper._kept) + coming)
        return keep(page)

    monkeypatch.setattr(fetcher, "_keep", counted)
    fetched = 0
    for prompt in prompts:
        offer, coming = share(prefill, prompt), 0
        engine.scheduler.kv_manager.prefixes.indexes[0].clear()  # but host memory keeps its pages
        deltas = collect(engine, [request(prompt, page_offer=offer)])
        assert deltas[-1].num_cached_tokens >= 56
        fetched += coming
        engine.scheduler.check()
    assert fetched > offload.host.num_pages >= most
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


def test_choices_draws_and_salts_go_the_same_way(prefill, decode):
    drawn = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=6, ignore_eos=True)
    whole = collect(decode, [request(PROMPT, params=drawn, cache_salt="a")])
    offer = share(prefill, PROMPT, cache_salt="a")
    decode.reset_prefix_cache()
    deltas = collect(decode, [request(PROMPT, params=drawn, cache_salt="a", page_offer=offer)])
    for index in range(2):
        assert tokens_of(deltas, "r", index) == tokens_of(whole, "r", index)
    assert {d.num_cached_tokens for d in deltas if d.finish_reason} == {56}
    assert continued(decode, PROMPT, offer, cache_salt="b").num_cached_tokens == 0


def test_a_prompt_that_was_partly_cached_is_shared_whole(prefill, decode, alone):
    collect(prefill, [request(PROMPT[:40], params=PREFILL)])
    offer = share(prefill, [*PROMPT[:40], 5, 6, 7, *range(20)])
    last = continued(decode, [*PROMPT[:40], 5, 6, 7, *range(20)], offer)
    assert last.num_cached_tokens == 56


def test_pages_that_are_missing_are_computed(prefill, decode, alone):
    offer = share(prefill, PROMPT)
    shelf = prefill._exporter._shelf
    collect(decode, [])
    keys = prefill.scheduler.kv_manager.prefixes
    chain: list[bytes] = []
    keys.indexes[0].extend(chain, PROMPT)
    shelf.forget(chain[3:])
    last = continued(decode, PROMPT, offer)
    assert last.token_ids == alone and last.num_cached_tokens == 24


def test_a_damaged_page_and_those_behind_it_are_computed(prefill, decode, alone, caplog):
    chain: list[bytes] = []
    prefill.scheduler.kv_manager.prefixes.indexes[0].extend(chain, PROMPT)
    prefill._exporter._shelf.forget(chain)
    prefill.reset_prefix_cache()
    offer = share(prefill, PROMPT)
    with prefill._exporter._shelf.reading(chain, 20.0) as pages:
        pages[2].data[100] ^= 1
    last = continued(decode, PROMPT, offer)
    assert last.token_ids == alone and last.num_cached_tokens == 16
    assert "page 2 of 4 is damaged" in caplog.text  # of the first of two connections
    prefill._exporter._shelf.forget(chain)


def test_an_engine_that_is_gone_costs_recomputation_and_no_request(make, decode, alone, caplog):
    gone = make("kv_both")
    offer = share(gone, PROMPT)
    assert continued(decode, PROMPT, offer).num_cached_tokens == 56
    close(gone)
    last = continued(decode, PROMPT, offer)
    assert last.token_ids == alone and last.num_cached_tokens == 0
    assert "7 KV pages are computed, not fetched" in caplog.text


def test_running_requests_go_on_while_pages_are_fetched_and_a_deadline_ends_the_wait(
    prefill, decode, alone, monkeypatch
):
    offer, asked, go_on = share(prefill, PROMPT), threading.Event(), threading.Event()
    heard = threading.Event()

    def late(self: PageClient, *arguments: Any) -> Iterator[np.ndarray]:
        asked.set()
        go_on.wait(20)
        yield from ()

    monkeypatch.setattr(PageClient, "fetch", late)
    decode.reset_prefix_cache()
    decode.when_built(heard.set)
    decode.add(request(PROMPT, page_offer=offer))
    assert asked.wait(20) and decode.awaits_grammar and decode.stats().waiting == 1
    decode.add(replace(request(PROMPT[:9]), id="other"))
    assert not decode.awaits_grammar
    deltas: list[TextDelta] = []
    while not any(delta.finish_reason for delta in deltas):
        deltas += decode.step()
    assert {delta.id for delta in deltas} == {"other"} and not heard.is_set()
    go_on.set()
    assert heard.wait(20)
    assert tokens_of(collect(decode, []), "r") == alone


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
        assert engine._unscheduled._fetcher is not None
        wait(engine._unscheduled._fetcher.pending, 20)


def aborted(engine: Engine, offer: dict[str, Any]) -> None:
    """Begin a request that waits for pages, and abort it."""
    engine.reset_prefix_cache()
    engine.add(request(PROMPT, page_offer=offer))
    assert engine._unscheduled.waiting
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
    assert len(host._reserved) == 7
    held.let_go(decode)
    collect(decode, [request(PROMPT[:9])])
    assert host._reserved == set()


def test_a_fetch_that_ends_while_ended_ones_are_looked_for_is_not_lost(prefill, decode, alone):
    class Ending(Future[list[Page]]):
        """Ends once it was asked whether it has."""

        def done(self) -> bool:
            was = super().done()
            if not was:
                self.set_result([])
            return was

    fetcher = decode._unscheduled._fetcher
    offer = share(prefill, PROMPT)
    decode.reset_prefix_cache()
    decode.add(request(PROMPT, page_offer=offer))
    wait(fetcher.pending, 20)
    (fetch,) = fetcher._fetches
    fetcher._fetches = [fetch._replace(pages=Ending())]
    assert fetcher.pop_arrived() == [] and fetcher.waiting == 1
    assert tokens_of(collect(decode, []), "r") == alone


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


def test_an_offer_that_was_changed_is_refused_and_one_of_another_model_ignored(
    make, prefill, decode, alone, monkeypatch
):
    offer = share(prefill, PROMPT)
    with pytest.raises(RequestError, match="kv_transfer_params: no engine with this one's key"):
        decode.add(request(PROMPT, page_offer=offer | {"remote_port": 1}))
    other = make("kv_producer", seed=1)
    last = continued(decode, PROMPT, share(other, PROMPT))
    assert last.token_ids == alone and last.num_cached_tokens == 0
    close(other)


def test_a_role_does_not_do_what_the_other_does(prefill, decode):
    offer = share(prefill, PROMPT)
    with pytest.raises(RequestError, match="do_remote_prefill needs a server whose kv_role"):
        prefill.add(request(PROMPT, page_offer=offer))
    with pytest.raises(RequestError, match="do_remote_decode needs a server whose kv_role"):
        decode.add(request(PROMPT, shares_pages=True))


def test_an_engine_without_the_option_says_how_to_start_it(make_engine):
    engine = make_engine()
    for more in ({"shares_pages": True}, {"page_offer": {}}):
        with pytest.raises(RequestError, match="start it with --kv-transfer-config"):
            engine.add(request(PROMPT, **more))


def test_weights_that_others_share_pages_of_stay(prefill, tmp_path):
    with pytest.raises(ValueError, match="keeps its weights"):
        prefill.sleeper.update_weights(tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_offloading_size": None}, "give --kv-offloading-size"),
        ({"kv_transfer_config": {"kv_role": "both"}}, "kv_role must be one of"),
        ({"kv_transfer_config": []}, "--kv-transfer-config must be an object"),
    ],
    ids=["host memory", "role", "type"],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(make_engine, key_file, change, why):
    config = {"kv_role": "kv_both", "kv_connector_extra_config": {"key_file": key_file}}
    with pytest.raises(ConfigError, match=why):
        make_engine(**({"kv_offloading_size": 0.001, "kv_transfer_config": config} | change))


WAYS: dict[str, dict[str, Any]] = {
    "fp8": {"kv_cache_dtype": "fp8"},
    "swap": {"preemption_mode": "swap", "swap_space": 0.001},
    "synchronous": {"async_scheduling": False},
    "2 shards to 2": {"tensor_parallel_size": 2},
    "batch invariant": {"batch_invariant": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", list(WAYS))
def test_every_way_to_hold_pages_gives_the_same_tokens(make, make_engine, way):
    whole = tokens_of(collect(make_engine(**WAYS[way]), [request(PROMPT)]), "r")
    first, second = make("kv_producer", **WAYS[way]), make("kv_consumer", **WAYS[way])
    last = continued(second, PROMPT, share(first, PROMPT))
    assert last.token_ids == whole and last.num_cached_tokens == 56
    close(first)
    close(second)


@pytest.mark.slow
def test_two_devices_continue_what_one_has_computed(make, alone):
    first, second = make("kv_producer"), make("kv_consumer", tensor_parallel_size=2)
    last = continued(second, PROMPT, share(first, PROMPT))
    assert last.token_ids == alone and last.num_cached_tokens == 56
    close(first)
    close(second)


@pytest.mark.slow
def test_pages_of_latents_go_the_same_way(make, make_engine, repo):
    model = {"model": str(repo / "tests/goldens/deepseek-v2-lite"), "load_format": "dummy"}
    whole = tokens_of(collect(make_engine(**model), [request(PROMPT)]), "r")
    first, second = make("kv_producer", **model), make("kv_consumer", **model)
    last = continued(second, PROMPT, share(first, PROMPT))
    assert last.token_ids == whole and last.num_cached_tokens == 56
    close(first)
    close(second)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_whatever_is_evicted_aborted_or_preempted_tokens_and_accounts_are_right(
    make, make_engine, mode
):
    random, tight = np.random.default_rng(5), {"num_gpu_blocks_override": 20}
    # 16 KiB of a page's 8 tokens; so some pages are pushed out of host memory
    swaps = {"preemption_mode": "swap", "swap_space": 0.0001} if mode == "swap" else {}
    first = make("kv_producer", **tight)
    second = make("kv_both", **tight, **swaps)
    second.scheduler.estimator = Optimist()
    stem = PROMPT[:40]
    prompts = [[*stem[: 8 * (n % 6)], n + 1, *PROMPT[n : n + 30]] for n in range(24)]
    alone_engine = make_engine(num_gpu_blocks_override=96)
    wanted = [tokens_of(collect(alone_engine, [request(p)]), "r") for p in prompts]
    for _ in range(3):
        for prompt in prompts[::2]:
            offer = share(first, prompt)
        waiting = [int(n) for n in random.permutation(len(prompts))]
        aborted: set[str] = set()
        deltas: list[TextDelta] = []
        while waiting or second.has_work:
            while waiting and random.random() < 0.5:
                n = waiting.pop()
                second.add(replace(request(prompts[n], page_offer=offer), id=str(n)))
                if random.random() < 0.1:
                    second.abort(str(n))
                    aborted.add(str(n))
            deltas += second.step() if second.has_work else []
            second.scheduler.check()
        for n, tokens in enumerate(wanted):
            if str(n) not in aborted:
                assert tokens_of(deltas, str(n)) == tokens
    assert second.stats().pages_loaded > 0 and second.stats().free_pages == 20
    close(first)
    close(second)
