"""What the largest step needs, and what a second start need not do again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxllm.cache.arrays import page_counts
from jaxllm.cache.backends import Backend
from jaxllm.config import EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime import lattice as module
from jaxllm.engine.runtime.lattice import Key, Programs
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.startup import measure
from jaxllm.engine.startup.compile_workers import CompileWorkers
from jaxllm.engine.startup.kv_requirements import PAGE_ROUND
from jaxllm.engine.startup.lattice import Lattice, make_programs, plan_lattice
from jaxllm.engine.startup.measure import (
    CompiledSteps,
    kept_need,
    make_few,
    measured_need,
    sizing_depths,
)
from jaxllm.engine.startup.memory_plan import MemoryPlan, first_plan, fit
from jaxllm.engine.startup.model_plan import ModelPlan
from jaxllm.engine.startup.together import Together
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import TINY, run
from tests.engine.startup.decisions import decide
from tests.targets import H200

pytestmark = pytest.mark.usefixtures("cache")


def on_a_card(directory: str | Path, **wishes: object) -> ModelPlan:
    """A model as on a device with 64 MiB of its own. Of each kind there is the largest program
    alone: XLA's CPU compiler copies pages for one decode row."""
    usual: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
    }
    model = decide(EngineConfig(model=str(directory), **(usual | wishes)), directory).model
    buckets = replace(
        model.buckets,
        decode=(2,),
        extend=model.buckets.extend[-1:],
        logits=model.buckets.logits[-1:],
    )
    budget = replace(model.budget, usable=2**26, shared=False)
    return replace(model, budget=budget, buckets=buckets)


def of_layers(directory: Path, **config: Any) -> ModelPlan:
    """A tiny model with this configuration."""
    (directory / "config.json").write_text(json.dumps(TINY | config))
    return on_a_card(directory, load_format="dummy")


def lattice_of(model: ModelPlan) -> Lattice:
    """Of the first plan."""
    return plan_lattice(model, first_plan(model))


def fitted(model: ModelPlan) -> tuple[MemoryPlan, Programs]:
    """The pools of a start, and its programs."""
    with Together(3) as together:
        steps = CompiledSteps(model, [model], CompileWorkers(), together, lambda *_: None)
        return fit(model, first_plan(model), steps), steps.programs[-1]


def test_the_pool_is_what_the_largest_step_leaves_and_its_need_does_not_depend_on_the_pool(
    tiny_dir: str,
) -> None:
    model = on_a_card(tiny_dir)
    memory, programs = fitted(model)
    budget = memory.budget
    assert budget.workspace != model.budget.workspace
    assert memory.num_pages != first_plan(model).num_pages
    assert 0 <= budget.for_pages - memory.kv_bytes < 64 * model.need.group_bytes
    assert programs.peak_bytes == pytest.approx(budget.workspace, rel=0.02)


def test_there_are_slots_for_all_rows_of_the_largest_step(tiny_dir: str) -> None:
    lattice = replace(lattice_of(on_a_card(tiny_dir)), buckets=Buckets.build(100, 256, "gpu"))
    shapes = make_programs(lattice).shapes
    assert shapes.slots == shapes.buckets.decode[-1] == 112


@pytest.mark.slow
def test_few_layers_tell_the_need_of_all_where_attention_has_its_own_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = of_layers(tmp_path, num_hidden_layers=9)
    memory = first_plan(model)
    programs = make_programs(plan_lattice(model, memory))
    whole = measured_need(model, memory, programs)
    assert programs.largest in programs._compiled
    monkeypatch.setattr(Backend, "is_kernel", True)
    programs = make_programs(plan_lattice(model, memory))
    assert measured_need(model, memory, programs) == pytest.approx(whole, rel=0.02)
    assert programs.largest not in programs._compiled


def test_a_need_that_grows_with_depth_is_continued_to_all_layers() -> None:
    assert measure.at_depth((3, 6), (100, 130), 28) == 130 + 22 * 10
    assert measure.at_depth((3, 6), (130, 100), 28) == 100, "what is lost once is not lost again"
    assert measure.at_depth((5,), (70,), 5) == 70


@pytest.mark.parametrize(
    ("config", "depths"),
    [
        ({"num_hidden_layers": 28}, (3, 6)),
        ({"num_hidden_layers": 6}, (6,)),
        # As of Gemma 3, whose sixth layer is the first that sees everything
        (
            {
                "num_hidden_layers": 18,
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
            },
            (6, 12),
        ),
        (
            {
                "num_hidden_layers": 12,
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 9,
            },
            (12,),
        ),
    ],
)
def test_the_forward_that_is_measured_has_layers_of_every_kind(
    config: dict[str, Any], depths: tuple[int, ...], tmp_path: Path
) -> None:
    model = of_layers(tmp_path, **config)
    assert sizing_depths(model) == depths
    memory = first_plan(model)
    few = make_few(model, memory, depths[0]).shapes
    assert all(arrays.layers > 0 for arrays in few.kv)
    assert page_counts(few.kv) == memory.group_pages
    assert few.vocab_size == model.spec.vocab_size


def test_layers_of_a_mixture_after_dense_ones_are_another_kind(tmp_path: Path) -> None:
    mixture = {
        "model_type": "deepseek_v2",
        "num_hidden_layers": 20,
        "first_k_dense_replace": 3,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    }
    assert sizing_depths(of_layers(tmp_path, **mixture)) == (4, 8)


def test_a_program_that_finds_no_memory_while_the_need_is_measured_is_compiled_once_more(
    tiny_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_a_card(tiny_dir)
    memory = first_plan(model)
    programs = make_programs(plan_lattice(model, memory))
    failed: list[Key] = []

    def compiling(self: Programs, key: Key) -> Any:
        if self is programs and failed.count(key) < 2:
            failed.append(key)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return SimpleNamespace(memory_analysis=lambda: None)

    monkeypatch.setattr(Programs, "_compile", compiling)
    monkeypatch.setattr(Backend, "is_kernel", True)
    measured_need(model, memory, programs)
    assert sorted(failed) == sorted(2 * programs.largest_others) != []


def test_a_program_that_many_threads_want_is_compiled_once_and_an_error_is_not_kept(
    tiny_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = make_programs(lattice_of(on_a_card(tiny_dir)))
    key = programs.largest_others[0]
    real, times, asked = programs._compile, [], threading.Semaphore(0)

    class Making(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            asked.release()
            return super().result(timeout)

    def counted(key: Key) -> jax.stages.Compiled:
        times.append(key)
        assert asked.acquire(timeout=60), "the other one waits"
        if len(times) == 1:
            raise RuntimeError("no memory to compile")
        return real(key)

    monkeypatch.setattr(programs, "_compile", counted)
    monkeypatch.setattr(module, "Future", Making)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(programs.get, key) for _ in range(2)]
        assert all(isinstance(each.exception(), RuntimeError) for each in waiting)
        assert asked.acquire(timeout=60), "who compiled asked, too"
        once = [pool.submit(programs.get, key) for _ in range(2)]
        assert once[0].result() is once[1].result() is programs.get(key)
    assert len(times) == 2


def test_a_second_start_knows_the_need_and_lowers_only_what_is_cheap(tiny_dir: str) -> None:
    model = on_a_card(tiny_dir)
    first, programs = fitted(model)
    kept = {programs.name(key) for key in programs.lattice if programs.is_kept(key)}
    assert programs.executables.lowered >= len(kept)
    assert kept_need(programs) == first.budget.workspace
    again, programs = fitted(model)
    assert programs.executables.lowered == 0
    assert again == first


@pytest.mark.slow
def test_programs_are_made_again_for_the_pools_that_a_larger_step_leaves(
    tiny_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_one = Programs._compile

    def counted(self: Programs, key: Key) -> Any:
        compiled.append(self.name(key))
        return compile_one(self, key)

    monkeypatch.setattr(measure, "measured_need", lambda *_: 1000)
    monkeypatch.setattr(Programs, "peak_bytes", 2**23)
    monkeypatch.setattr(Programs, "_compile", counted)
    model = on_a_card(tiny_dir)
    memory, programs = fitted(model)
    assert memory.budget.workspace == kept_need(programs) == 2**23
    assert programs.shapes.kv == plan_lattice(model, memory).pages()
    assert len(compiled) == len(set(compiled)) > len(programs.lattice), "forwards alone, twice"


def test_another_model_length_is_another_set_of_programs(tiny_dir: str) -> None:
    models = [on_a_card(tiny_dir), on_a_card(tiny_dir, max_model_len=32), on_a_card(tiny_dir)]
    folders = [lattice_of(model).exports() for model in models]
    assert folders[0] is not None
    assert folders[0].folder == folders[2].folder != folders[1].folder  # type: ignore[union-attr]


def test_a_length_that_memory_shortens_is_of_the_same_set(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 4096}))
    model = on_a_card(tmp_path, load_format="dummy", max_model_len="auto")
    rest = model.budget.usable - replace(model.budget, workspace=0).for_pages
    usable = rest + PAGE_ROUND * model.need.group_bytes
    small = replace(model, budget=replace(model.budget, usable=usable))
    lattices = [lattice_of(model), lattice_of(small)]
    assert lattices[0].resolved.max_model_len > lattices[1].resolved.max_model_len
    folders = [lattice.exports() for lattice in lattices]
    assert folders[0] is not None and folders[1] is not None
    assert folders[0].folder == folders[1].folder, "so the need is known"
    names = [make_programs(lattice).name for lattice in lattices]
    key = make_programs(lattices[0]).largest
    assert names[0](key) != names[1](key)


def test_a_cache_that_is_no_local_folder_keeps_no_programs(tiny_dir: str) -> None:
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
    assert make_programs(lattice_of(on_a_card(tiny_dir))).executables.exports is None


@pytest.mark.slow
def test_an_engine_says_the_same_after_a_second_start(every_shape: Callable[..., Engine]) -> None:
    wishes = {"enforce_eager": False, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 24}
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)
    first, second = every_shape(**wishes), every_shape(**wishes)
    assert (
        first.runner.programs.executables.lowered > 0,
        second.runner.programs.executables.lowered,
    ) == (True, 0)
    assert run(first, [[5, 6, 7], [8] * 20], params) == run(second, [[5, 6, 7], [8] * 20], params)
    assert second.stats().compiles_after_warmup == 0


@pytest.mark.parametrize(
    ("vocab_size", "backend", "samplers"), [(1024, "mosaic_gpu", 2), (1000, "reference", 3)]
)
def test_the_draw_kernel_is_left_out_where_it_does_not_take_the_vocabulary(
    tiny_dir: str, vocab_size: int, backend: str, samplers: int
) -> None:
    programs = make_programs(lattice_of(on_a_card(tiny_dir)))
    model = replace(programs.shapes.model, target=H200)
    other = replace(programs.shapes, model=model, vocab_size=vocab_size)
    assert (other.draw_backend, len(other.samplers)) == (backend, samplers)
