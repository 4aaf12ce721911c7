"""Pages that leave for host memory and come back: a request gets the same tokens however it was
interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime import page_swapper
from jaxllm.engine.runtime.launch import HostBuffers
from jaxllm.engine.scheduling.plan import Moves
from jaxllm.mesh import make_mesh
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect, run
from tests.engine.fake_host import Optimist
from tests.engine.runtime.test_unsaved import Unmade

MakeEngine = Callable[..., Engine]
PROMPTS = [[number, *range(1, 20 + 3 * number)] for number in range(1, 7)]
WAYS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "swap": {"preemption_mode": "swap", "swap_space": 0.01},
    "swap without prefix caching": {
        "preemption_mode": "swap",
        "swap_space": 0.01,
        "enable_prefix_caching": False,
    },
    "swap and a host tier": {
        "preemption_mode": "swap",
        "swap_space": 0.001,
        "kv_offloading_size": 0.01,
    },
    "host tier": {"kv_offloading_size": 0.01},
    "swap, synchronous": {"preemption_mode": "swap", "swap_space": 0.01, "async_scheduling": False},
    "swap over 4 shards": {
        "preemption_mode": "swap",
        "swap_space": 0.01,
        "tensor_parallel_size": 4,
    },
}


@pytest.fixture(scope="module")
def alone(make_engine: MakeEngine) -> list[list[int]]:
    engine = make_engine(max_num_seqs=1, async_scheduling=False, enable_prefix_caching=False)
    return [run(engine, [prompt], params(number))[0] for number, prompt in enumerate(PROMPTS)]


def params(number: int) -> SamplingParams:
    """Greedy and drawn in turn."""
    drawn: dict[str, Any] = (
        {"temperature": 1.0, "top_p": 0.9, "seed": number} if number % 2 else {"temperature": 0}
    )
    return SamplingParams(max_tokens=40, ignore_eos=True, **drawn)


QUICK = ("swap", "swap and a host tier")  # the others take a minute


@pytest.mark.parametrize(
    "way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_tokens_are_those_of_a_request_alone_however_it_was_interrupted(
    make_engine: MakeEngine, alone: list[list[int]], way: str
) -> None:
    engine = make_engine(num_gpu_blocks_override=20, **WAYS[way])
    engine.scheduler.estimator = Optimist()
    for _ in range(2):  # the second time with what the first has left behind
        assert run(engine, PROMPTS, [params(number) for number in range(len(PROMPTS))]) == alone
        engine.scheduler.check()
    stats = engine.stats()
    assert stats.preemptions > 0
    assert (stats.pages_saved > 0) == (stats.pages_loaded > 0) == (way != "recompute")
    assert stats.free_pages == stats.num_pages
    if way == "swap":
        assert stats.host_usage == 0, "nobody is swapped out any more"


@pytest.mark.slow
def test_nothing_compiles_after_warm_up_and_the_link_is_measured(
    make_engine: MakeEngine, alone: list[list[int]]
) -> None:
    engine = make_engine(
        enforce_eager=False,
        num_gpu_blocks_override=20,
        preemption_mode="swap",
        swap_space=0.01,
        max_num_batched_tokens=16,
    )
    engine.scheduler.estimator = Optimist()
    assert run(engine, PROMPTS, [params(number) for number in range(len(PROMPTS))]) == alone
    assert engine.stats().compiles_after_warmup == 0
    assert engine.stats().pages_loaded > 0
    offload = engine.scheduler.offload
    assert (
        offload is not None
        and offload.link is engine.runner.link
        and 0 < offload.compute_seconds < 10
    )
    width = engine.resolved.moved_pages
    assert offload.link.width == width > 1
    assert 0 < offload.link.seconds(1) <= offload.link.seconds(width) < 10


def test_an_engine_that_failed_starts_with_empty_host_memory(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(num_gpu_blocks_override=20, preemption_mode="swap", swap_space=0.01)
    engine.scheduler.estimator = Optimist()
    for number, prompt in enumerate(PROMPTS):
        engine.add(GenerateRequest(id=str(number), prompt=Prompt(prompt), params=params(number)))
    while not engine.stats().host_usage:
        engine.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "forward", lambda plan: (_ for _ in ()).throw(RuntimeError))
        with pytest.raises(RuntimeError):
            engine.step()
    assert engine.stats().host_usage == 0
    engine.self_check()
    assert engine.stats().self_check_failures == 0
    collect(engine, [])


@pytest.mark.parametrize("odds", [1.0, 0.4])
@pytest.mark.parametrize("way", ["swap", "swap and a host tier"])
def test_pages_that_find_no_memory_are_computed_again_and_nobody_dies(
    make_engine: MakeEngine,
    alone: list[list[int]],
    way: str,
    odds: float,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(num_gpu_blocks_override=20, **WAYS[way])
    engine.scheduler.estimator = Optimist()
    swapper, rng, failed = engine.runner.swapper, random.Random(5), []
    assert swapper is not None
    saves = swapper._to_host

    def full(pages: Any) -> Any:
        if rng.random() < odds:
            failed.append(len(pages))
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Failed to allocate 1024 bytes of pinned memory"
            )
        return saves(pages)

    monkeypatch.setattr(swapper, "_to_host", full)
    for _ in range(2):
        assert run(engine, PROMPTS, [params(number) for number in range(len(PROMPTS))]) == alone
        engine.scheduler.check()
        assert set(swapper._kept) | swapper._lost >= {
            place for line in places_of(engine) for place in line
        }
    assert failed and engine.stats().preemptions > 0
    assert (engine.stats().pages_saved > 0) == (engine.stats().pages_loaded > 0) == (odds < 1), (
        "only what has come there counts"
    )
    assert len([record for record in caplog.records if "no host memory" in record.message]) == 1


@pytest.mark.parametrize("odds", [1.0, 0.4])
def test_copies_that_fail_only_when_they_are_made_cost_their_pages_alone(
    make_engine: MakeEngine, alone: list[list[int]], odds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(num_gpu_blocks_override=20, **WAYS["swap and a host tier"])
    engine.scheduler.estimator = Optimist()
    swapper, rng, asked, failed = engine.runner.swapper, random.Random(5), [0], [0]
    assert swapper is not None
    saves = swapper._to_host

    def late(pages: Any) -> Any:
        asked[0] += len(pages)
        if rng.random() >= odds:
            return saves(pages)
        failed[0] += len(pages)
        # With one of them the others are lost
        return ((Unmade(),) * len(pages[0]), *saves(pages)[1:])

    held, move = set[int](), engine.runner.move

    def looked(moves: Moves) -> None:
        held.update(
            swapper._lost
            | set(swapper._leaving) - {place for trip in swapper._out for place in trip.leaving}
        )
        move(moves)

    monkeypatch.setattr(swapper, "_to_host", late)
    monkeypatch.setattr(engine.runner, "move", looked)
    for _ in range(2):
        assert run(engine, PROMPTS, [params(number) for number in range(len(PROMPTS))]) == alone
        engine.scheduler.check()
    stats = engine.stats()
    assert stats.preemptions > 0 and failed[0] > 0
    assert stats.pages_saved == asked[0] - failed[0]
    assert not swapper._out and not swapper._leaving and not held, (
        "the device keeps no page longer than it must"
    )


def places_of(engine: Engine) -> list[list[int]]:
    """Where host memory says that something lies."""
    offload = engine.scheduler.offload
    assert offload is not None
    return [list(offload.host._pinned.values()), list(offload.host._cached.values())]


def test_pages_leave_for_pinned_memory_and_come_back_from_it(
    make_engine: MakeEngine, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [page_swapper.far_memory(platform) for platform in ("gpu", "tpu", "cpu")] == [
        "pinned_host",
        "pinned_host",
        None,
    ]
    # Which JAX has on CPU, too
    monkeypatch.setattr(page_swapper, "far_memory", lambda platform: "pinned_host")
    engine = make_engine(num_gpu_blocks_override=20, **WAYS["swap and a host tier"])
    engine.scheduler.estimator = Optimist()
    swapper, kept, fetched = engine.runner.swapper, set[str | None](), set[str | None]()
    assert swapper is not None
    move = engine.runner.move

    def noted(moves: Moves) -> None:
        move(moves)
        for found, pages in ((kept, swapper._kept), (fetched, swapper._fetched)):
            found.update(x.sharding.memory_kind for page in pages.values() for x in page)

    monkeypatch.setattr(engine.runner, "move", noted)
    assert run(engine, PROMPTS, [params(number) for number in range(len(PROMPTS))]) == alone
    assert (kept, fetched) == ({"pinned_host"}, {"device"})


def test_a_save_that_fails_for_another_reason_is_a_failure(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(num_gpu_blocks_override=20, **WAYS["swap"])
    engine.scheduler.estimator = Optimist()

    def broken(pages: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    assert engine.runner.swapper is not None
    monkeypatch.setattr(engine.runner.swapper, "_to_host", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        run(engine, PROMPTS, [params(number) for number in range(len(PROMPTS))])


def test_two_programs_more_and_only_with_host_memory(make_engine: MakeEngine) -> None:
    plain, swapping = make_engine(), make_engine(preemption_mode="swap", swap_space=0.01)
    more = set(swapping.runner.programs.lattice) - set(plain.runner.programs.lattice)
    assert {kind for kind, _ in more} == {"save_pages", "load_pages"} and len(more) == 2
    assert plain.runner.swapper is None and plain.scheduler.offload is None


def test_page_numbers_stay_as_they_are_until_their_program_has_run(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(num_gpu_blocks_override=40, preemption_mode="swap", swap_space=0.1)
    swapper = engine.runner.swapper
    assert swapper is not None
    pinned = NamedSharding(make_mesh(1), PartitionSpec(), memory_kind="pinned_host")
    buffers = HostBuffers(swapper._width, pinned, page_swapper.BUFFERS)
    track, arrive, send = swapper._track, swapper._arrive, swapper._number_buffers.send
    # Which buffer each program reads that may not have run; the device runs them in their order
    running: dict[int, int] = {}

    def sent(numbers: Any) -> Any:
        assert buffers._next not in running.values(), "written while it is read"
        buffers.send(numbers)
        return send(numbers)

    def tracked(queue: Any, most: int, trip: Any) -> None:
        running[id(trip)] = (buffers._next - 1) % page_swapper.BUFFERS
        track(queue, most, trip)

    def arrived(queue: Any) -> None:
        if (last := id(queue[0])) in running:
            for trip in list(running)[: list(running).index(last) + 1]:
                del running[trip]
        arrive(queue)

    monkeypatch.setattr(page_swapper, "is_there", lambda arrays: False)
    monkeypatch.setattr(swapper._number_buffers, "send", sent)
    monkeypatch.setattr(swapper, "_track", tracked)
    monkeypatch.setattr(swapper, "_arrive", arrived)
    kv, width, most = engine.runner.kv, swapper._width, 0
    places = range(page_swapper.PLAN_LOADS * width)
    kv = swapper.run(kv, Moves(tuple((place % 40, place) for place in places), (), ()))
    for _ in range(3):
        kv, _ = swapper.take_out(kv, [n % 40 for n in range(page_swapper.TAKEN * width)])
        puts = tuple((place, 1000 + place) for place in places)
        kv = swapper.run(kv, Moves(((0, 100), (1, 101)), tuple(places), puts))
        most = max(most, len(running))
    engine.runner.kv = kv
    assert most > page_swapper.TAKEN
