"""Pages go on to the device while later ones are still computed elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime.page_swapper import PLAN_LOADS
from jaxllm.messages import TextDelta
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect, tokens_of
from tests.engine.transfer.conftest import PREFILL, PROMPT, close, request

LONG = [(5 * i) % 90 + 1 for i in range(250)]  # 31 whole pages of 8, and 2 tokens


@pytest.fixture(scope="module")
def early(make: Callable[..., Engine]) -> Iterator[Engine]:
    """Computes prompts by 32 tokens a step, and answers at the first."""
    yield (engine := make("kv_producer", early=True, max_num_batched_tokens=32, **SIZES))
    close(engine)


@pytest.fixture(scope="module")
def second(make: Callable[..., Engine]) -> Iterator[Engine]:
    yield (engine := make("kv_consumer", **SIZES))
    close(engine)


SIZES = {"max_model_len": 320, "kv_offloading_size": 0.002}


@pytest.fixture(scope="module")
def wanted(make_engine: Callable[..., Engine]) -> list[int]:
    return tokens_of(collect(make_engine(max_model_len=320), [request(LONG)]), "r")


def answered(engine: Engine, prompt: list[int] = LONG, **more: Any) -> TextDelta:
    """The first leg's answer, while its prompt is still computed, of which no page is stored."""
    engine.reset_prefix_cache()
    shelf = engine.transfer.exporter.shelf
    shelf.forget([*shelf._pages])
    engine.add(request(prompt, **{"params": PREFILL, "shares_pages": True} | more))
    while not (deltas := engine.step()):
        pass
    (answer,) = deltas
    return answer


def stepped(engine: Engine) -> list[TextDelta]:
    """What a step gives, if there is one to take."""
    return engine.step() if engine.has_work and not engine.awaits_grammar else []


def test_the_second_leg_begins_with_the_first_and_its_pages_come_one_by_one(early, second, wanted):
    answer = answered(early)
    assert (answer.finish_reason, answer.token_ids, answer.text) == ("length", [], "")
    second.reset_prefix_cache()
    second.add(request(LONG, page_offer=early.resolved.page_offer))
    loaded, deltas = list[int](), list[TextDelta]()
    while early.has_work:
        assert early.step() == [], "the answer was given"
        deltas += stepped(second)
        loaded.append(second.runner.traffic.loaded)
    deltas += collect(second, [])
    assert tokens_of(deltas, "r") == wanted and deltas[-1].num_cached_tokens == 31 * 8
    assert deltas[-1].times is not None and deltas[-1].times.num_preemptions == 0
    second.scheduler.check()
    early.scheduler.check()


def test_a_page_is_on_the_device_before_the_next_one_is_computed(early, second, wanted):
    answered(early)
    second.reset_prefix_cache()
    before = second.runner.traffic.loaded
    early.step()  # the first chunk is collected while the third is computed
    early.step()
    second.add(request(LONG, page_offer=early.resolved.page_offer))
    while second.runner.traffic.loaded == before:
        second.step()  # waits for a page
    assert early.has_work, "most of the prompt is not computed yet"
    collect(early, [])
    assert tokens_of(collect(second, []), "r") == wanted


def test_other_requests_run_while_pages_are_awaited(early, second, wanted):
    answered(early)
    second.reset_prefix_cache()
    second.add(request(LONG, page_offer=early.resolved.page_offer))
    short = replace(request(LONG[:20]), id="short")
    assert tokens_of(until_end(second, [short], "short"), "short")
    assert early.has_work and second.stats().running == 1
    collect(early, [])
    assert tokens_of(collect(second, []), "r") == wanted


def until_end(engine: Engine, requests: list[Any], id: str) -> list[TextDelta]:
    for one in requests:
        engine.add(one)
    deltas: list[TextDelta] = []
    while not any(delta.id == id and delta.finish_reason for delta in deltas):
        deltas += engine.step()
    return deltas


def test_a_first_leg_that_is_aborted_costs_recomputation(early, second, wanted, caplog):
    answered(early)
    second.reset_prefix_cache()
    second.add(request(LONG, page_offer=early.resolved.page_offer))
    second.step()
    early.abort("r")
    assert collect(early, []) == [], "it had its answer"
    deltas = collect(second, [])
    assert tokens_of(deltas, "r") == wanted and deltas[-1].num_cached_tokens < 31 * 8
    assert deltas[-1].times is not None and deltas[-1].times.num_preemptions == 0
    second.scheduler.check()


def test_a_second_leg_that_is_aborted_leaves_nothing(early, second):
    answered(early)
    second.reset_prefix_cache()
    second.add(request(LONG, page_offer=early.resolved.page_offer))
    stepped(second)
    second.abort("r")
    assert [delta.finish_reason for delta in collect(second, [])] == ["abort"]
    collect(early, [])
    while second.pending.unsettled:
        second.pending.schedule_ready(True)
    second.scheduler.check()
    assert not second.scheduler.offload.host.promised


def test_two_requests_wait_for_the_same_pages(early, second, wanted):
    answered(early)
    second.reset_prefix_cache()
    offer = early.resolved.page_offer
    for id in ("r", "other"):
        second.add(replace(request(LONG, page_offer=offer), id=id))
    stepped(second)
    collect(early, [])
    deltas = collect(second, [])
    assert tokens_of(deltas, "r") == tokens_of(deltas, "other") == wanted
    second.scheduler.check()


@pytest.mark.parametrize(
    "more",
    [
        {"params": SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)},
        {"params": SamplingParams(temperature=0, max_tokens=1, logprobs=1)},
        {"params": SamplingParams(temperature=1, max_tokens=1, n=2)},
        {"shares_pages": False},
    ],
    ids=["two tokens", "logprobs", "choices", "not shared"],
)
def test_who_wants_more_than_pages_is_answered_with_it(early, more):
    early.reset_prefix_cache()
    params = {"params": PREFILL, "shares_pages": True} | more
    deltas = collect(early, [request(PROMPT, **params)])
    count = params["params"].max_tokens * params["params"].n
    assert sum(len(delta.token_ids) for delta in deltas) == count


def test_who_wants_what_the_context_holds_is_answered_with_it(early):
    early.reset_prefix_cache()
    prompt, params = [7] * 319, SamplingParams(temperature=0, max_tokens=None)
    (delta,) = collect(early, [request(prompt, params=params, shares_pages=True)])
    assert len(delta.token_ids) == 1 and delta.finish_reason


def test_an_answer_comes_once_without_overlapping_steps(make):
    engine = make("kv_producer", early=True, async_scheduling=False)
    deltas = collect(engine, [request(PROMPT, params=PREFILL, shares_pages=True)])
    assert [(delta.finish_reason, delta.token_ids) for delta in deltas] == [("length", [])]
    close(engine)


def test_only_who_sends_pages_shortens_steps_and_only_who_fetches_them_takes_few_at_once(
    make, early, second
):
    def sizes(engine: Engine) -> tuple[bool, int]:
        scheduler = engine.scheduler
        return scheduler.chunk_planner.taper is not None, scheduler.offload.max_fetches

    most = PLAN_LOADS * second.resolved.moved_pages
    assert most > 64, "or nothing is bounded"
    assert sizes(early) == (True, most) and sizes(second) == (False, 64)
    both, uniform = make("kv_both"), make("kv_producer", batch_invariant=True)
    assert sizes(both) == (False, 64) and sizes(uniform) == (False, most)
    close(both)
    close(uniform)
