"""The order of requests, and that every one gets its turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config import ConfigError
from jaxllm.engine.output.beam_search import Rules
from jaxllm.engine.scheduling.policy import HEAD_START, RequestQueue, fcfs, priority
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.startup.make_scheduler import scheduler_class
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.fake_device import EOS
from tests.engine.fake_host import Optimist
from tests.engine.fake_loop import Loop, Setup


def request(arrival: float = 0.0, priority: int = 0, order: tuple[float, ...] = ()) -> Request:
    params = SamplingParams(priority=priority)
    return Request(
        id="x",
        index=0,
        prompt=Prompt([1]),
        params=params,
        seed=0,
        arrival=arrival,
        max_tokens=1,
        order=order,
    )


def test_first_come_first_served_looks_at_nothing_else() -> None:
    assert fcfs(request(5.0, priority=-9)) == fcfs(request(1.0))


@pytest.mark.parametrize(
    ("value", "seconds"), [(0, 0), (1, 10), (-1, -10), (3, 20), (-1023, -100), (2**31 - 1, 310)]
)
def test_a_priority_is_a_head_start_in_seconds(value: int, seconds: float) -> None:
    assert HEAD_START == 10
    assert priority(request(100.0, value)) == pytest.approx(100 + seconds)


@given(st.integers(-(2**31), 2**31 - 2))
def test_of_two_that_arrive_together_the_lower_priority_goes_first(value: int) -> None:
    assert priority(request(0.0, value)) < priority(request(0.0, value + 1))


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1))
def test_no_priority_passes_one_that_has_waited_long_enough(mine: int, others: int) -> None:
    longest = 2 * HEAD_START * 31.001
    assert priority(request(0.0, mine)) < priority(request(longest, others))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_a_queue_is_always_sorted(moves: list[tuple[bool, int]]) -> None:
    line, members = RequestQueue(), list[Request]()
    for number, (leaves, rank) in enumerate(moves):
        if leaves and members:
            gone = members.pop(rank % len(members))
            line.remove(gone)
            assert gone not in line
            with pytest.raises(KeyError):
                line.remove(gone)
        else:
            members.append(request(order=(rank, number)))
            line.insert(members[-1])
        expected = sorted(members, key=lambda r: r.order)
        assert list(line) == expected
        assert len(line) == len(expected)
        assert not expected or (line.first, line.last) == (expected[0], expected[-1])


def test_a_low_priority_waits_for_a_bounded_time_however_many_come_after_it() -> None:
    loop = Loop(Setup(max_num_seqs=2, policy="priority", num_pages=8))
    for _ in range(4):
        loop.add([1, 2, 3], 4, priority=-50)
    waiting = loop.add([4, 5, 6], 4, priority=50)
    assert waiting is not None
    arrived = 0
    while waiting.status is not Status.FINISHED:  # two arrive for each one that can be served
        loop.add([1, 2, 3], 4, priority=-50)
        loop.add([1, 2, 4], 4, priority=-50)
        arrived += 2
        loop.step()
        loop.step()
    ahead = [r for r in loop.requests if r.status is Status.FINISHED and r is not waiting]
    assert 4 < len(ahead) <= 5 + 2 * HEAD_START * 5.7 + 2, (
        "those that arrived within its delay and their head start"
    )
    assert arrived > len(ahead), "more than those have arrived meanwhile"
    loop.drain()
    loop.check_ended()


def test_an_urgent_request_is_admitted_before_those_that_wait_and_keeps_its_pages() -> None:
    loop = Loop(
        Setup(
            page_size=2,
            num_pages=12,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            policy="priority",
            caching=False,
        )
    )
    first, second, third = (loop.add([n, 3, 3], 12) for n in (1, 2, 3))
    loop.step()
    urgent = loop.add([9, 3, 3], 12, priority=-100)
    assert first is not None and second is not None and urgent is not None
    loop.abort(first)
    loop.step()
    assert urgent.status is Status.RUNNING
    while not second.num_preemptions and second.status is not Status.FINISHED:
        loop.step()
    assert urgent.num_preemptions == 0
    loop.drain()
    loop.check_ended()


class ShortestFirst(Scheduler):
    """Ranks a request by arrival and by `max_tokens`, a second for each token."""

    def rank(self, request: Request) -> float:
        return request.arrival + request.max_tokens


def test_a_scheduler_of_ones_own_is_found_by_name_and_must_be_one() -> None:
    assert scheduler_class(None) is Scheduler
    for name in (f"{__name__}:ShortestFirst", f"{__name__}.ShortestFirst"):
        assert scheduler_class(name) is ShortestFirst
    for name, says in (
        ("nowhere:X", "No module"),
        (f"{__name__}:Nothing", "no attribute"),
        ("ShortestFirst", "module:Class"),
        ("jaxllm.engine.scheduling.policy:RequestQueue", "subclass"),
        (":", "module:Class"),
    ):
        with pytest.raises(ConfigError, match=says):
            scheduler_class(name)


def test_a_beam_that_its_search_waits_for_goes_before_who_waits_for_the_search() -> None:
    loop = Loop(Setup(policy="priority", num_pages=10, estimator=Optimist))
    older = loop.add([1] * 12, 20)
    loop.step()
    search = loop.search(
        [7] * 4, Rules(width=2, max_tokens=13, min_tokens=12, stops=frozenset([EOS]))
    )
    assert older is not None and search is not None
    while {beam.status for beam in search.members} != {Status.WAITING, Status.RUNNING} or len(
        search.members
    ) < 2:
        loop.step()
    loop.abort(older)
    assert loop.add([9] * 38, 3, priority=-300) is not None, (
        "it needs every page, and the beam that runs holds some"
    )
    loop.drain()
    loop.check_ended()
