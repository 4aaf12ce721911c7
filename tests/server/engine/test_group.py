"""The statistics of several engines are those of one."""

from __future__ import annotations

import dataclasses

from jaxllm.messages import STEP_TOKENS, EngineStats
from jaxllm.server.engine.group import total


def test_counts_are_added_and_the_fullest_engine_is_shown() -> None:
    sizes = tuple(range(len(STEP_TOKENS) + 1))
    one = EngineStats(running=2, deferred=1, kv_usage=0.5, steps=7, step_tokens=sizes)
    other = dataclasses.replace(one, kv_usage=0.25, self_check_problem="broken", sleep_level=1)
    both = total([one, other])
    assert (both.running, both.deferred, both.steps) == (4, 2, 14)
    assert both.step_tokens == tuple(2 * count for count in sizes)
    assert (both.kv_usage, both.self_check_problem, both.sleep_level) == (0.5, "broken", 0)


def test_no_statistic_is_left_out() -> None:
    full = EngineStats(
        **{
            field.name: "x"
            if field.type == "str"
            else tuple([1] * (len(STEP_TOKENS) + 1))
            if field.type.startswith("tuple")
            else 1
            for field in dataclasses.fields(EngineStats)
        }
    )
    nothing = EngineStats()
    both = total([full, full])
    for field in dataclasses.fields(EngineStats):
        assert getattr(both, field.name) != getattr(nothing, field.name), field.name
