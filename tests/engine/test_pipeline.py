"""An engine whose layers are divided into stages: its answers, and how the stages share time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import pytest

from jaxllm.cache.pool import PagePool
from jaxllm.commands import Sleep, UpdateWeights, WakeUp
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.engine import Engine
from jaxllm.engine.follow import Devices
from jaxllm.engine.runtime.compilation.compile_counter import CompileCounter
from jaxllm.engine.runtime.dispatch import NoStages
from jaxllm.engine.runtime.launch import Launch
from jaxllm.engine.runtime.pipeline.follower import StageFollower
from jaxllm.engine.runtime.pipeline.stages import EarlierStages
from jaxllm.engine.runtime.replay import (
    Command,
    Reset,
    encode,
    replay,
)
from jaxllm.engine.runtime.runner import Collected, Forwarded, Runner, StepResult
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.scheduling.plan import Limits, Moves, Plan
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.startup.limits import divide
from jaxllm.engine.startup.started import Started, check_fit
from jaxllm.engine.startup.weight_source import WeightSource
from jaxllm.messages import GenerateRequest
from jaxllm.models import make_spec
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import TINY, collect, outcomes, run, tokens_of
from tests.engine.fake_host import Optimist
from tests.engine.runtime.test_unsaved import Unmade
from tests.engine.test_invariants import ASKING, PROMPTS, SEEDED
from tests.engine.test_shared_layers import WAYS
from tests.goldens.golden import load_golden
from tests.server.fake import RESOLVED

STAGE = 0.020  # seconds that a stage takes for a step
ASKED = [SamplingParams(**SEEDED | options) for options in ASKING]
type MakeEngine = Callable[..., Engine]


def test_two_stages_give_the_tokens_of_one(make_engine: MakeEngine) -> None:
    one, two = make_engine(), make_engine(pipeline_parallel_size=2)
    assert isinstance(two.runner.before, EarlierStages)
    for found, expected in zip(
        outcomes(two, PROMPTS, ASKED), outcomes(one, PROMPTS, ASKED), strict=True
    ):
        found.assert_like(expected)
    two.scheduler.check()
    assert two.stats().free_pages == two.stats().num_pages


WITH = ["8-bit pages", "batch invariant", "int4 weights", "processed log-probabilities"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WITH)
def test_tokens_of_two_stages_are_those_of_one_whatever_goes_with_them(
    way: str, make_engine: MakeEngine
) -> None:
    found = []
    for stages in (1, 2):
        engine = make_engine(pipeline_parallel_size=stages, **WAYS[way])
        # A second time prefixes are cached
        found.append(outcomes(engine, PROMPTS, ASKED) + outcomes(engine, PROMPTS, ASKED))
    for one, two in zip(*found, strict=True):
        two.assert_like(one)


SCARCE = {"num_gpu_blocks_override": 20}
SWAPS: dict[str, Any] = SCARCE | {"preemption_mode": "swap", "swap_space": 0.01}
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize(
    "wishes",
    [
        SWAPS,
        pytest.param({"kv_offloading_size": 0.01}, marks=pytest.mark.slow),
    ],
    ids=["swap", "host tier"],
)
def test_pages_of_all_stages_come_back_from_host_memory(
    wishes: dict[str, Any], make_engine: MakeEngine
) -> None:
    wanted = run(make_engine(), PROMPTS, LONG)
    two = make_engine(pipeline_parallel_size=2, **SCARCE | wishes)
    two.scheduler.estimator = Optimist()
    # A second time prefixes are on the host
    assert run(two, PROMPTS, LONG) == run(two, PROMPTS, LONG) == wanted
    stats = two.stats()
    assert stats.pages_saved > 0 and stats.pages_loaded > 0
    assert isinstance(two.runner.before, EarlierStages)
    moved = stats.pages_saved, stats.pages_loaded
    assert all((s.traffic.saved, s.traffic.loaded) == moved for s in two.runner.before.stages)


def test_a_page_that_one_stage_has_lost_is_lost(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_engine(pipeline_parallel_size=2, preemption_mode="swap", swap_space=0.01).runner
    assert isinstance(runner.before, EarlierStages)
    (first,) = runner.before.stages
    monkeypatch.setattr(first.swapper, "_to_host", lambda pages: ((Unmade(),),) * len(pages))
    runner.move(Moves(saves=((0, 3), (1, 4)), fetches=(), puts=()))
    jax.block_until_ready((runner.kv, first.kv))
    assert runner.lost() == [3, 4] and runner.lost() == []


@pytest.mark.slow
def test_stages_keep_their_weights_and_pages_on_devices_of_their_own(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(pipeline_parallel_size=2, tensor_parallel_size=2)
    run(engine, PROMPTS, ASKED[3])
    assert isinstance(engine.runner.before, EarlierStages)
    found = []
    for stage in (*engine.runner.before.stages, engine.runner):
        arrays = jax.tree.leaves((stage.weights, stage.kv))
        found.append({device.id for array in arrays for device in array.devices()})
        assert stage.kv[0].planes[0].shape[0] == engine.resolved.num_pages, "one layer's pages"
    assert found == [{0, 1}, {2, 3}]
    names = [
        {key.program for key in stage.programs.lattice}
        for stage in (*engine.runner.before.stages, engine.runner)
    ]
    assert names[0] == {"decode", "extend", "update_slots", "copy_pages", "advance"}
    assert "advance" not in names[1] and {"decode", "sample", "logprobs"} <= names[1]


@pytest.mark.slow
def test_no_program_is_compiled_for_a_request_once_stages_are_warm(make_engine: MakeEngine) -> None:
    engine = make_engine(pipeline_parallel_size=2, enforce_eager=False)
    for params in (ASKED[1], SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=2)):
        run(engine, PROMPTS, params)
    assert engine.runner.compiles.since_start == 0


@pytest.mark.slow
def fail_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a step fail when it is collected."""

    def fail(result: StepResult) -> Collected:
        raise RuntimeError("as the test wants")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "collect", fail)
        with pytest.raises(RuntimeError, match="as the test wants"):
            run(engine, PROMPTS, ASKED[0])


def test_an_engine_in_stages_works_after_a_step_that_failed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(pipeline_parallel_size=2)
    wanted = run(engine, PROMPTS, ASKED[0])
    fail_once(engine, monkeypatch)
    assert run(engine, PROMPTS, ASKED[0]) == wanted


@pytest.mark.slow
def test_beams_of_a_search_run_in_one_group(make_engine: MakeEngine) -> None:
    params = SamplingParams(n=3, use_beam_search=True, temperature=0, max_tokens=8, ignore_eos=True)
    wishes: dict[str, Any] = {"max_num_seqs": 6, "max_logprobs": 20}
    found = []
    for stages in (1, 2):
        engine = make_engine(pipeline_parallel_size=stages, **wishes)
        deltas = collect(
            engine,
            [
                GenerateRequest(id=str(i), prompt=Prompt(prompt), params=params)
                for i, prompt in enumerate(PROMPTS[1:4])
            ],
        )
        found.append([tokens_of(deltas, str(i), beam) for i in range(3) for beam in range(3)])
        engine.scheduler.check()
    assert found[0] == found[1]


@pytest.mark.slow
def test_stages_that_are_read_from_a_cache_of_weights_give_the_tokens_of_one(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    model = str(load_golden("llama-gqa").directory)
    wishes = {"model": model, "load_format": "auto", "quantization": "int4"}
    kept = {"weight_cache_dir": str(tmp_path), "pipeline_parallel_size": 2}
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = run(make_engine(**wishes), PROMPTS, greedy)
    for _ in range(2):
        assert run(make_engine(**wishes, **kept), PROMPTS, greedy) == expected
        assert len([*tmp_path.glob("[!.]*")]) == 2, "an entry for each stage"


class Wire:
    """Hands over between a runner and one that follows it, in one process. The follower has run a
    launch by the time that the runner does."""

    def __init__(self) -> None:
        self.under_way = deque[jax.Array]()

    def send(self, array: jax.Array) -> None:
        self.under_way.append(array)

    def receive(self, like: jax.ShapeDtypeStruct) -> jax.Array:
        found = self.under_way.popleft()
        assert (found.shape, found.dtype) == (like.shape, like.dtype)
        return jax.device_put(found, like.sharding)


def apart(engine: Engine, told: Callable[[Command], None]) -> None:
    """Have the engine's first stage follow its last one as on another host. `told` gets every
    command before the follower does."""
    runner, wire = engine.runner, Wire()
    assert isinstance(runner.before, EarlierStages)
    follower = Devices(
        StageFollower(runner.before.stages, None, wire),  # type: ignore[arg-type]
        WeightSource(engine.sleeper.source.models[:1]),
    )
    runner.before = EarlierStages((), wire)  # type: ignore[arg-type]
    engine.sleeper.source = WeightSource(engine.sleeper.source.models[1:])

    def tell(command: Command) -> None:
        told(command)
        replay(encode(command), follower)

    runner.tell = tell


def test_a_stage_that_follows_gives_the_tokens_of_one_device(make_engine: MakeEngine) -> None:
    one, two = make_engine(**SWAPS), make_engine(**SWAPS, pipeline_parallel_size=2)
    kinds = set[type]()
    apart(two, lambda command: kinds.add(type(command)))
    for found, expected in zip(
        outcomes(two, PROMPTS, ASKED), outcomes(one, PROMPTS, ASKED), strict=True
    ):
        found.assert_like(expected)
    two.scheduler.estimator = Optimist()
    wanted = run(one, PROMPTS, LONG)
    assert run(two, PROMPTS, LONG) == wanted
    for level in (1, 2):
        two.sleeper.sleep(level)
        two.sleeper.wake_up()
        assert run(two, PROMPTS, LONG) == wanted
    two.scheduler.check()
    assert two.stats().pages_loaded > 0
    assert kinds == {Launch, Moves, Sleep, WakeUp, UpdateWeights}


def test_a_step_of_stages_on_two_hosts_waits_for_its_own_group_alone(
    make_engine: MakeEngine,
) -> None:
    two, waited = make_engine(pipeline_parallel_size=2), list[list[int]]()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    def told(command: Command) -> None:
        assert isinstance(command, Launch)
        if command.calls[0][0].program == "advance":
            waited.append([step.group for step in two.loop.in_flight])

    apart(two, told)
    run(two, PROMPTS[:4], params)
    others = [groups for groups in waited if len(set(groups)) == 2]
    assert len(others) >= 15, "a step of the other group was in flight"


def test_a_stage_that_follows_is_ready_after_a_step_that_failed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, kinds = make_engine(pipeline_parallel_size=2), list[type]()
    apart(two, lambda command: kinds.append(type(command)))
    wanted = run(two, PROMPTS, ASKED[0])
    fail_once(two, monkeypatch)
    assert kinds[-1] is Reset
    assert run(two, PROMPTS, ASKED[0]) == wanted


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"pipeline_parallel_size": 3}, "is more than the 2 layers of the model; set it to at most 2"),
    ({"tensor_parallel_size": 8}, "2 stages of 8 devices need 16 devices, but there are 8"),
    ({"max_num_seqs": 1}, "--max-num-seqs 1 leaves stages without requests"),
    ({"runner": "pooling"}, "a pooling model does not go with"),
]


@pytest.mark.parametrize(("wishes", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_go_with_stages_is_refused_in_one_line(
    tiny_dir: str, wishes: dict[str, Any], says: str
) -> None:
    common = {"model": tiny_dir, "load_format": "dummy", "pipeline_parallel_size": 2}
    with pytest.raises(ConfigError, match=says) as caught:
        check_fit(EngineConfig(**common | wishes))
    assert "\n" not in str(caught.value)


def test_stages_that_the_usual_requests_do_not_fill_are_refused() -> None:
    spec = make_spec(TINY | {"num_hidden_layers": 20})
    config = EngineConfig(model="any", pipeline_parallel_size=17)
    with pytest.raises(ConfigError, match=r"--max-num-seqs 16 leaves .* at least .* \(17\)"):
        divide(config, spec, 16)
    assert len(divide(config, spec, 17)) == 17


def test_an_engine_in_stages_says_so_in_its_decisions(tiny_dir: str) -> None:
    config = EngineConfig(model=tiny_dir, load_format="dummy", pipeline_parallel_size=2)
    rows = dict(check_fit(config))
    assert rows["stages"] == (
        "layers 0 to 0; layers 1 to 1 on 1 devices each; 2 groups of 8 requests in turn"
    )
    assert rows["device"].startswith("2 × ")


class Timed(NamedTuple):
    """A step of the device without arithmetic; `group` as of `StepResult`."""

    plan: Plan
    ends: float

    @property
    def group(self) -> int:
        return self.plan.group


class TimedStages(Runner):
    """Stages that take `STAGE` seconds a step of a clock of their own, and run what they were given
    in order. The step of a group takes the token of its step before."""

    def __init__(self, stages: int):
        self.clock, self.free, self.told = 0.0, [0.0] * stages, dict[int, float]()
        self.shapes: Any = SimpleNamespace(
            buckets=Buckets.build(4, 64, "cpu"), model=SimpleNamespace(processors=())
        )
        self.depth, self.seconds, self.swapper = 1, {}, None
        self.compiles = CompileCounter()
        self.before = NoStages()
        self.steps = 0

    def forward(self, plan: Plan) -> Forwarded:
        needs = frozenset[int]()
        return Forwarded(plan, range(len(plan.emitters)), len(plan.emitters), needs, None)

    def draw(self, forwarded: Forwarded, unused: Any = ()) -> Any:
        plan = forwarded.plan
        ends = max(self.clock, self.told.get(plan.group, 0.0))
        for stage, free in enumerate(self.free):
            ends = self.free[stage] = max(free, ends) + STAGE
        self.told[plan.group] = ends
        self.steps += 1
        return Timed(plan, ends)

    def collect(self, result: Any) -> Collected:
        self.clock = max(self.clock, result.ends)
        return Collected(result.plan, [[5] for _ in result.plan.emitters], None, [], {})


def tokens_a_second(overlaps: bool) -> float:
    """Of four requests in two groups, by the stages' clock."""
    runner, tokens = TimedStages(stages=2), 50
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, groups=2)
    scheduler = Scheduler(limits, [PagePool(64, 16, None)], runner.shapes.buckets)
    resolved = replace(RESOLVED, async_scheduling=overlaps)
    source: Any = None  # no weights are read
    parts = Started(resolved, runner, None, Grammars(None, 320, []), source, lambda: None)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    deltas = collect(
        Engine(parts, scheduler, seed=0),
        [GenerateRequest(id=str(i), prompt=Prompt([i]), params=params) for i in range(4)],
    )
    assert all(len(tokens_of(deltas, str(i))) == tokens for i in range(4))
    return 4 * tokens / runner.clock


def test_stages_work_at_once_on_groups_in_turn() -> None:
    one_by_one, at_once = tokens_a_second(overlaps=False), tokens_a_second(overlaps=True)
    assert one_by_one == pytest.approx(2 / (2 * STAGE), rel=0.05), "a step takes both stages"
    assert at_once >= 1.6 * one_by_one
