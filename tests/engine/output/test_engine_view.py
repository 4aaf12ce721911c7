"""What a watched engine shows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from jaxllm.cache.pool import PagePool
from jaxllm.cache.prefix import PrefixIndex
from jaxllm.engine.engine import Engine
from jaxllm.engine.output import engine_view
from jaxllm.engine.output.counters import Counters
from jaxllm.engine.output.engine_view import EngineWatch, pool_view
from jaxllm.messages import STEP_TOKENS
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import run


def test_a_cell_has_three_digits_and_any_page_shows() -> None:
    index = PrefixIndex(4, b"")
    pool = PagePool(4096, 4, index)
    first, second = pool.allocate(2)
    index.register(b"a", second)
    for _ in range(20):
        pool.share([first])
    pool.release([second])
    view = pool_view(pool)
    assert (view.per_cell, len(view.cells)) == (4, 3 * 1024)
    assert view.cells == "44f" + "000" * 1023  # one of four pages held, one cached, 15 or more
    assert (view.held, view.cached, view.window) == (1, 1, None)


def test_a_steps_time_starts_with_the_end_of_the_step_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter((1.0, 2.0, 5.0, 6.0, 20.0, 21.0))
    monkeypatch.setattr(engine_view.time, "perf_counter", lambda: next(clock))

    class Decode:
        chunks, decodes, tokens = (), (1, 2), 2

    watch = EngineWatch(None)  # type: ignore[arg-type]
    watch.step_launched(Decode())  # type: ignore[arg-type]  # at 1
    watch.step_launched(Decode())  # type: ignore[arg-type]  # at 2
    watch.step_collected(Decode())  # type: ignore[arg-type]  # at 5: 4 s
    watch.step_collected(Decode())  # type: ignore[arg-type]  # at 6: 1 s
    watch.step_launched(Decode())  # type: ignore[arg-type]  # at 20
    watch.step_collected(Decode())  # type: ignore[arg-type]  # at 21: 1 s
    found = watch._totals["decode"]
    assert (found.steps, found.seconds, found.tokens) == (3, 6.0, 6)


def test_an_engine_counts_its_steps_by_kind(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    run(engine, [[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
    totals = engine.watch.view().step_totals
    assert totals["prefill"].steps == 1
    assert totals["prefill"].tokens == 3
    assert totals["decode"].steps >= 4
    assert sum(total.steps for total in totals.values()) == engine.stats().steps
    assert all((total.seconds > 0) == (total.steps > 0) for total in totals.values())
    assert engine.watch.view().pools[0].held == 0


def test_an_engine_counts_its_steps_by_their_tokens(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    run(engine, [list(range(1, 11))], SamplingParams(max_tokens=5, ignore_eos=True))
    stats, totals = engine.stats(), engine.watch.view().step_totals
    assert stats.step_tokens[STEP_TOKENS.index(16)] == 1  # the prompt of 10
    assert stats.step_tokens[0] == totals["decode"].steps >= 4
    assert sum(stats.step_tokens) == stats.steps
    assert stats.computed_tokens == sum(total.tokens for total in totals.values())


def test_a_step_counts_up_to_its_bound_and_any_size_counts() -> None:
    counters = Counters()
    for tokens in (1, 2, 8, 9, 2**14, 2**14 + 1, 10**6):
        counters.step_launched(SimpleNamespace(tokens=tokens))  # type: ignore[arg-type]
    assert counters.step_tokens == [1, 2, 1, *[0] * (len(STEP_TOKENS) - 4), 1, 2]
    assert counters.computed_tokens == 20 + 2**15 + 1 + 10**6
