"""A prompt that was not found in full says why."""

from __future__ import annotations

import pytest

from jaxllm.cache import prefix
from jaxllm.engine.scheduling import prefix_misses
from jaxllm.engine.scheduling.request import Request
from tests.engine.fake_loop import Loop, Setup

PAGE = 4
TEXT = [i % 29 + 1 for i in range(60)]


def loop_of(num_pages: int = 60) -> Loop:
    return Loop(Setup(page_size=PAGE, num_pages=num_pages))


def run(
    loop: Loop, prompt: list[int], salt: str | None = None, adapter: bytes | None = None
) -> Request:
    """A request that has ended."""
    request = loop.add(prompt, 2)
    assert request is not None
    request.cache_salt, request.adapter = salt, adapter
    loop.drain()
    return request


def test_new_text_is_named_from_the_token_where_it_begins() -> None:
    loop = loop_of()
    first = run(loop, TEXT[:21])
    again = run(loop, TEXT[:13] + [30] * 8)
    assert (first.num_cached_tokens, first.prefix_miss) == (0, "new_text")
    assert (again.num_cached_tokens, again.prefix_miss) == (12, "new_text")


def test_what_a_request_finds_of_itself_when_it_comes_back_says_nothing() -> None:
    loop = loop_of()
    request = loop.add(TEXT[:21], 9)
    assert request is not None
    while not request.output:
        loop.step()
    loop.preempt_all()
    loop.drain()
    assert request.num_preemptions == 1
    assert (request.num_cached_tokens, request.prefix_miss) == (0, "new_text")


@pytest.mark.parametrize("length", [1, PAGE, 13, 14])
def test_a_prompt_that_was_found_as_far_as_possible_misses_nothing(length: int) -> None:
    loop = loop_of()
    run(loop, TEXT[:length])
    assert run(loop, TEXT[:length]).prefix_miss is None


def test_another_salt_is_the_reason_whoever_came_first() -> None:
    loop = loop_of()
    assert run(loop, TEXT[:21]).prefix_miss == "new_text"
    assert run(loop, TEXT[:21], "one").prefix_miss == "salt"
    assert run(loop, TEXT[:21], "one").prefix_miss is None
    assert run(loop, TEXT[:21], "two").prefix_miss == "salt"
    other = TEXT[30:51]
    assert run(loop, other, "one").prefix_miss == "new_text"
    assert run(loop, other).prefix_miss == "salt"


def test_another_adapter_is_the_reason() -> None:
    loop = loop_of()
    run(loop, TEXT[:21])
    assert run(loop, TEXT[:21], adapter=b"a").prefix_miss == "adapter"
    assert run(loop, TEXT[:21], adapter=b"b").prefix_miss == "adapter"


def test_an_evicted_page_is_the_reason() -> None:
    loop = loop_of(num_pages=8)
    run(loop, TEXT[:21])
    run(loop, TEXT[30:58])
    again = run(loop, TEXT[:21])
    assert again.prefix_miss == "evicted" and again.num_cached_tokens < 20


def test_what_a_reset_has_forgotten_counts_as_evicted() -> None:
    loop = loop_of()
    run(loop, TEXT[:21])
    loop.forget_prefixes()
    assert run(loop, TEXT[:21]).prefix_miss == "evicted"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "MAX_EVICTED", 3)
    monkeypatch.setattr(prefix_misses, "MAX_STARTS", 3)
    loop = loop_of(num_pages=8)
    for i in range(6):
        run(loop, TEXT[i : i + 12], f"salt-{i}")
    assert loop.prefix is not None and len(loop.prefix._evicted) == 3
    assert len(loop.scheduler.kv_manager.counts.misses._starts) == 3


def test_without_an_index_nothing_is_explained() -> None:
    loop = Loop(Setup(caching=False))
    assert run(loop, TEXT[:21]).prefix_miss is None
