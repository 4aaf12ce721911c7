"""Steps are planned late, but seldom too late."""

from __future__ import annotations

import random

import pytest

from jaxllm.engine.scheduling.arrival_wait import (
    MAX_WAIT,
    RECENT,
    TARGET,
    ArrivalWait,
    WaitEstimate,
)


def turns(
    step: float, host: float, count: int, patience: WaitEstimate, jitter: float = 0.0
) -> list[float]:
    """Margins of `turns` turns, on a device whose steps take `step` seconds, by a host that needs
    `host` seconds to plan and launch one."""
    rng, margins = random.Random(0), []
    for _ in range(count):
        margins.append(max(0.0, step - patience.seconds - host - jitter * rng.random()))
        patience.learn(margins[-1])
    return margins


@pytest.mark.parametrize("step", [3e-3, 5e-3, 12e-3])
def test_a_step_is_planned_as_late_as_the_margin_allows(step: float) -> None:
    patience = WaitEstimate()
    assert turns(step, 0.7e-3, 60, patience)[-1] == pytest.approx(TARGET, rel=0.05)
    assert patience.seconds == pytest.approx(step - 0.7e-3 - TARGET, rel=0.05)


def test_a_host_that_needs_the_whole_step_never_waits() -> None:
    patience = WaitEstimate()
    turns(1.5e-3, 1.4e-3, 50, patience)
    assert patience.seconds < 1e-5


def test_shorter_steps_find_the_host_late_a_few_times_only() -> None:
    patience = WaitEstimate()
    turns(12e-3, 0.7e-3, 60, patience)
    late = [margin for margin in turns(4e-3, 0.7e-3, 100, patience) if margin == 0]
    assert len(late) <= 4


def test_jitter_within_the_margin_makes_nothing_late() -> None:
    patience = WaitEstimate()
    turns(5e-3, 0.5e-3, 60, patience)
    assert min(turns(5e-3, 0.5e-3, 300, patience, jitter=0.3e-3)) > 0


def test_one_late_launch_costs_the_wait_a_margin_and_two_in_a_row_half_of_it() -> None:
    patience = WaitEstimate()
    turns(9e-3, 0.6e-3, 200, patience)
    before = patience.seconds
    patience.learn(0.0)
    assert patience.seconds == pytest.approx(before - TARGET)
    patience.learn(0.0)
    assert patience.seconds == pytest.approx((before - TARGET) / 2)


def test_a_margin_that_is_never_used_up_is_not_waited_out_later() -> None:
    patience = WaitEstimate()
    for _ in range(10_000):
        patience.learn(9e-3)
    assert patience.seconds == MAX_WAIT


def amid_arrivals() -> ArrivalWait:
    """An `ArrivalWait` whose requests have come just now."""
    lookout = ArrivalWait(lambda: 0.0)
    lookout.request_arrived()
    return lookout


def taught_by_decodes(margin: float) -> ArrivalWait:
    """An `ArrivalWait` after many steps of decodes alone that each left this margin."""
    lookout = amid_arrivals()
    lookout.step_launched(None, 0.0)
    for _ in range(60):
        lookout.wait_seconds()
        lookout.step_launched(None, margin)
    return lookout


def test_beside_chunks_nobody_looks_out_longer_than_they_add() -> None:
    lookout = amid_arrivals()
    for _ in range(60):
        lookout.step_launched(8e-3, 9e-3 - lookout.wait_seconds())
        lookout.wait_seconds()
        lookout.step_launched(None, 9e-3)
    lookout.step_launched(3e-3, 9e-3)
    assert lookout.wait_seconds() == 3e-3
    lookout.step_launched(8e-3, 9e-3)
    assert 7e-3 < lookout.wait_seconds() <= 8e-3


def test_what_decodes_teach_says_nothing_of_steps_with_chunks_and_the_other_way_round() -> None:
    lookout = taught_by_decodes(15e-3)
    assert lookout.wait_seconds() > 10e-3
    lookout.step_launched(50e-3, 15e-3)
    assert lookout.wait_seconds() == 0.0


def test_chunks_beside_which_steps_come_late_are_unlearned_without_a_step_of_decodes() -> None:
    lookout = amid_arrivals()
    lookout.step_launched(15e-3, 0.0)
    for _ in range(60):
        lookout.wait_seconds()
        lookout.step_launched(None, 12e-3)
        lookout.step_launched(15e-3, 12e-3)
    before = lookout.wait_seconds()
    assert before > 5e-3
    for _ in range(12):
        lookout.step_launched(15e-3, 0.0)
        lookout.wait_seconds()
    assert lookout.wait_seconds() < 1e-5


def test_a_turn_that_takes_long_to_plan_chunks_teaches_nothing_of_decodes() -> None:
    lookout = taught_by_decodes(5e-3)
    before = lookout.wait_seconds()
    lookout.step_launched(8e-3, 0.0)
    lookout.step_launched(None, 0.0)
    assert lookout.wait_seconds() == before
    lookout.device_idle()
    assert lookout.wait_seconds() == 0.0


def test_nobody_looks_out_when_no_request_has_come_of_late() -> None:
    now = 0.0
    lookout = ArrivalWait(lambda: now)
    lookout.request_arrived()
    lookout.step_launched(None, 0.0)
    for _ in range(60):
        lookout.wait_seconds()
        lookout.step_launched(None, 5e-3)
    now = RECENT
    assert lookout.wait_seconds() > 3e-3
    now = RECENT + 0.1
    assert lookout.wait_seconds() == 0.0
    lookout.step_launched(None, 0.0)  # launched at once, which teaches nothing
    lookout.request_arrived()
    assert lookout.wait_seconds() > 3e-3
