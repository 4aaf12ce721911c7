"""A prompt computed by one engine and continued by another gives the tokens of one engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.kv_transfer.client import PageClient
from jaxllm.messages import RequestError, TextDelta
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect, tokens_of
from tests.engine.fake_host import Optimist
from tests.engine.transfer.conftest import PREFILL, PROMPT, close, continued, request, share


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
    assert tokens_of(again, "r") == alone and not decode.pending.unsettled


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
    shelf = prefill.transfer.exporter.shelf
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
    prefill.transfer.exporter.shelf.forget(chain)
    prefill.reset_prefix_cache()
    offer = share(prefill, PROMPT)
    with prefill.transfer.exporter.shelf.reading(chain[2], 20.0) as damaged:
        damaged.data[100] ^= 1
    last = continued(decode, PROMPT, offer)
    assert last.token_ids == alone and last.num_cached_tokens == 16
    assert "page 2 of 7 is damaged" in caplog.text
    prefill.transfer.exporter.shelf.forget(chain)


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
    assert decode.step() == [] and decode.awaits_grammar and decode.stats().running == 1
    assert asked.wait(20)
    decode.add(replace(request(PROMPT[:9]), id="other"))
    assert not decode.awaits_grammar
    deltas: list[TextDelta] = []
    while not any(delta.finish_reason for delta in deltas):
        deltas += decode.step()
    assert {delta.id for delta in deltas} == {"other"} and not heard.is_set()
    go_on.set()
    assert heard.wait(20)
    assert tokens_of(collect(decode, []), "r") == alone


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
