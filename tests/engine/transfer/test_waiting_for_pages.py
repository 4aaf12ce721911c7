"""Who waits for pages of another engine: choices, requests beside one that is aborted, and those
whose pages do not come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.messages import TextDelta
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect, tokens_of
from tests.engine.transfer.conftest import PROMPT, close, request, share
from tests.engine.transfer.test_host_memory import Held


def computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each chunk that the engine launches from now on."""
    counts, forward = list[int](), engine.runner.forward

    def counted(plan: Any) -> Any:
        counts.extend(chunk.end - chunk.start for chunk in plan.chunks)
        return forward(plan)

    monkeypatch.setattr(engine.runner, "forward", counted)
    return counts


def test_all_choices_of_a_request_wait_for_its_pages(prefill, decode, monkeypatch):
    offer, counts = share(prefill, PROMPT), computed(decode, monkeypatch)
    params = SamplingParams(temperature=0, n=3, max_tokens=4, ignore_eos=True)
    decode.reset_prefix_cache()
    loaded = decode.stats().pages_loaded
    deltas = collect(decode, [request(PROMPT, params=params, page_offer=offer)])
    assert {d.num_cached_tokens for d in deltas if d.finish_reason} == {56}
    assert decode.stats().pages_loaded - loaded == 7, "each page once"
    assert sum(counts) <= 3 * 5, counts
    decode.scheduler.check()


def test_who_waits_for_pages_of_a_request_that_is_aborted_gets_them(
    prefill, decode, alone, monkeypatch
):
    offer, held = share(prefill, PROMPT), Held(monkeypatch)
    decode.reset_prefix_cache()
    for id in ("first", "r"):
        decode.add(replace(request(PROMPT, page_offer=offer), id=id))
    decode.step()
    decode.abort("first")
    held.let_go(decode)
    deltas = collect(decode, [])
    assert tokens_of(deltas, "r") == alone and deltas[-1].num_cached_tokens == 56
    decode.scheduler.check()


@pytest.mark.parametrize("n", [1, 2])
def test_prefix_queries_are_counted_once_when_no_page_comes(make, decode, n):
    gone = make("kv_producer")
    offer = share(gone, PROMPT)
    close(gone)
    decode.reset_prefix_cache()
    index = decode.scheduler.kv_manager.prefixes.indexes[0]
    before = index.queries, index.hits
    params = SamplingParams(temperature=0, n=n, max_tokens=4, ignore_eos=True)
    decode.add(request(PROMPT, params=params, page_offer=offer))
    deltas, told = list[TextDelta](), list[int]()
    while decode.has_work:
        deltas += decode.step()
        told.append(decode.stats().prefix_hits)
    assert told == sorted(told)
    assert (index.queries, index.hits) == (before[0] + len(PROMPT), before[1])
    assert {d.num_cached_tokens for d in deltas if d.finish_reason} == {0}


def test_an_error_that_nobody_expects_is_told_and_costs_recomputation(
    prefill, decode, alone, monkeypatch, caplog
):
    offer = share(prefill, PROMPT)

    def fails(parts: Any) -> Any:
        raise TypeError("not a page")

    monkeypatch.setattr(decode.runner.swapper, "made", fails)
    decode.reset_prefix_cache()
    deltas = collect(decode, [request(PROMPT, page_offer=offer)])
    assert tokens_of(deltas, "r") == alone and deltas[-1].num_cached_tokens == 0
    assert "not a page" in caplog.text
