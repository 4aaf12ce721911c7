"""The pool fitted to the largest step, and what a second start need not do again."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxllm import weights
from jaxllm.cache.arrays import page_counts
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime import lattice as module
from jaxllm.engine.runtime.lattice import Key, Programs
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.engine.startup import sizing
from jaxllm.engine.startup.memory import MemoryBudget
from jaxllm.engine.startup.resolve import Setup, resolve
from jaxllm.engine.startup.sizing import (
    UNUSED_SHARE,
    abstract_pages,
    check_largest_step,
    fit_pool,
    make_programs,
    shallow,
    with_workspace,
    workspace_to_reserve,
)
from jaxllm.mesh import make_mesh
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import TINY, run

pytestmark = pytest.mark.usefixtures("cache")


def decide(tiny_dir: str, **wishes: object) -> tuple[Setup, EngineConfig]:
    """Decisions as on a device with 64 MiB of its own. Of each kind there is the largest
    program alone: XLA's CPU compiler copies pages for one decode row."""
    config = EngineConfig(
        model=tiny_dir, max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16, **wishes
    )  # type: ignore[arg-type]
    setup = resolve(config, weights.ModelFiles(tiny_dir), [make_mesh(1)])
    budget = replace(setup.memory.budget, usable=2**26, shared=False)
    buckets = replace(
        setup.buckets,
        decode=(2,),
        extend=setup.buckets.extend[-1:],
        logits=setup.buckets.logits[-1:],
    )
    return replace(setup, memory=replace(setup.memory, budget=budget), buckets=buckets), config


def test_the_pool_is_what_the_largest_step_leaves_and_its_need_does_not_depend_on_the_pool(
    tiny_dir: str,
) -> None:
    before, config = decide(tiny_dir)
    setup, programs = fit_pool(before, make_programs(before), config)
    budget = setup.memory.budget
    assert budget.workspace != before.memory.budget.workspace
    assert setup.resolved.num_pages == setup.memory.num_pages != before.resolved.num_pages
    assert 0 <= budget.for_pages - setup.memory.kv_bytes < 64 * setup.need.group_bytes
    programs.compile_all()
    assert programs.peak_bytes == pytest.approx(budget.workspace, rel=0.02), (
        "a few layers need what all do"
    )
    check_largest_step(setup, programs)


def test_there_are_slots_for_all_rows_of_the_largest_step(tiny_dir: str) -> None:
    setup, _ = decide(tiny_dir)
    setup = replace(setup, buckets=Buckets.build(100, 256, "gpu"))
    shapes = make_programs(setup).shapes
    assert shapes.slots == shapes.buckets.decode[-1] == 112


@pytest.mark.parametrize(
    ("likely", "need", "kept"), [(9, 9, 9), (9, 8, 9), (9, 10, 10), (1009, 9, 1009), (1010, 9, 9)]
)
def test_what_was_likely_is_kept_if_it_is_enough_and_wastes_little(
    likely: int, need: int, kept: int
) -> None:
    weights = 2**40  # however large the device is that they fill
    budget = MemoryBudget(
        usable=weights + likely + 1000 * UNUSED_SHARE,
        weights=weights,
        workspace=likely,
        shared=False,
        expected=True,
    )
    assert workspace_to_reserve(budget, need) == kept
    assert workspace_to_reserve(replace(budget, expected=False), need) == need


@pytest.mark.parametrize(
    ("surplus", "right"),
    [(2**25 // UNUSED_SHARE, True), pytest.param(-(2**22), False, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_programs_for_the_likely_pool_are_compiled_while_it_is_checked(
    tiny_dir: str, surplus: int, right: bool
) -> None:
    need, config = fitted_need(tiny_dir), decide(tiny_dir)[1]
    setup = decide(tiny_dir)[0]
    setup = with_workspace(setup, config, need + surplus)
    budget = replace(setup.memory.budget, expected=True)
    setup = replace(setup, memory=replace(setup.memory, budget=budget))
    before = make_programs(setup)
    told: list[tuple[int, int]] = []
    found, programs = fit_pool(setup, before, config, lambda *done: told.append(done))
    assert (programs is before, found.memory.budget.workspace) == (
        right,
        need + surplus if right else need,
    )
    assert not found.memory.budget.expected
    made = {key[0] for key in programs._compiled}
    assert (made >= {"decode", "extend"}) == right, (
        "those of a pool that is not to be are not compiled any further"
    )
    assert told[-1][0] == told[-1][1]
    again, later = fit_pool(setup, make_programs(setup), config)
    assert (again, later._compiled) == (found, {}), (
        "a later start decides the same without compiling"
    )


def test_who_is_interrupted_while_all_programs_are_compiled_waits_for_those_that_have_begun(
    tiny_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, config = decide(tiny_dir)
    setup = with_workspace(before, config, 1000)
    setup = replace(
        setup, memory=replace(setup.memory, budget=replace(setup.memory.budget, expected=True))
    )
    programs, stopped, begun = make_programs(setup), threading.Event(), list[bool]()

    def compiling(self: Programs, key: Key) -> Any:
        if self is programs and key not in programs.largest_others:
            begun.append(stopped.wait(30))
            assert begun[-1]
        return SimpleNamespace(memory_analysis=lambda: None)

    def interrupt() -> None:
        raise KeyboardInterrupt

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *given: Any) -> Any:  # type: ignore[override]
            work = super().submit(*given)
            monkeypatch.setattr(work, "result", interrupt)
            return work

    stop = programs.stop
    monkeypatch.setattr(programs, "stop", lambda: (stop(), stopped.set()))
    monkeypatch.setattr(Programs, "_compile", compiling)
    monkeypatch.setattr(sizing, "ThreadPoolExecutor", Interrupted)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        fit_pool(setup, programs, config)
    assert all(begun) and len(begun) <= 2, "one a thread at most"


def test_the_decisions_are_told_while_programs_are_still_compiled_for_them(
    tiny_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, config = decide(tiny_dir)
    setup = with_workspace(before, config, 1000)
    budget = replace(setup.memory.budget, expected=True)
    setup = replace(setup, memory=replace(setup.memory, budget=budget))
    programs, told, final = make_programs(setup), list[Setup](), threading.Event()
    waited = list[bool]()

    def compiling(self: Programs, key: Key) -> Any:
        if self is programs and key not in programs.largest_others:
            waited.append(final.wait(30))
        return SimpleNamespace(memory_analysis=lambda: None)

    def decided(setup: Setup) -> None:
        told.append(setup)
        final.set()

    monkeypatch.setattr(Programs, "_compile", compiling)
    found, same = fit_pool(setup, programs, config, None, decided)
    assert told == [found] and same is programs
    assert waited and all(waited)
    again, _ = fit_pool(setup, make_programs(setup), config, None, decided)
    assert told == [found, again], "of a need that is known"


def test_a_program_that_finds_no_memory_while_the_pool_is_sized_is_compiled_once_more(
    tiny_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, config = decide(tiny_dir)
    programs, failed = make_programs(setup), list[Key]()

    class Late(ThreadPoolExecutor):
        """Begins when somebody waits for it."""

        def submit(self, work: Any, *given: Any) -> Any:  # type: ignore[override]
            return SimpleNamespace(result=lambda: work(*given))

    def compiling(self: Programs, key: Key) -> Any:
        if self is programs and key not in failed:
            failed.append(key)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return SimpleNamespace(memory_analysis=lambda: None)

    monkeypatch.setattr(Programs, "_compile", compiling)
    monkeypatch.setattr(sizing, "ThreadPoolExecutor", Late)
    fit_pool(setup, programs, config)
    assert sorted(failed) == sorted(programs.largest_others) != []


def fitted_need(tiny_dir: str) -> int:
    """What the largest step needs, with nothing kept of finding it."""
    before, config = decide(tiny_dir)
    programs = make_programs(before)
    need = fit_pool(before, programs, config)[0].memory.budget.workspace
    assert programs.executables.exports is not None
    (programs.executables.exports.folder / "figures.json").unlink()
    return need


def test_a_program_that_many_threads_want_is_compiled_once_and_an_error_is_not_kept(
    tiny_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = make_programs(decide(tiny_dir)[0])
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
    before, config = decide(tiny_dir)
    first, programs = fit_pool(before, make_programs(before), config)
    programs.compile_all()
    assert programs.executables.lowered == sum(map(programs.is_kept, programs.lattice)), (
        "each once but for the small"
    )
    again, programs = fit_pool(before, make_programs(before), config)
    programs.compile_all()
    assert programs.executables.lowered == 0
    assert again == first


def test_a_model_of_fewer_layers_keeps_their_kinds(tiny_dir: str) -> None:
    setup, _ = decide(tiny_dir)
    few = shallow(setup, 1)
    assert few.spec.layers == setup.spec.layers[:1] and len(setup.spec.layers) == 2
    (arrays,) = abstract_pages(few)
    assert arrays.layers == 1
    assert len(jax.tree.leaves(few.outline.state)) < len(jax.tree.leaves(setup.outline.state))
    assert few.spec.vocab_size == setup.spec.vocab_size


@pytest.mark.slow
def test_few_layers_of_a_hybrid_have_the_pools_of_their_kinds(tmp_path: Path) -> None:
    hybrid = TINY | {
        "num_hidden_layers": 6,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 5,
    }
    (tmp_path / "config.json").write_text(json.dumps(hybrid))
    setup, _ = decide(str(tmp_path))
    pages = abstract_pages(setup)
    assert setup.resolved.windows == tuple(group.window for group in setup.groups) == (None, 8)
    assert [group.layers for group in setup.groups] == [(0, 1, 2, 3, 4), (5,)]
    assert [arrays.layers for arrays in pages] == [5, 1]
    assert page_counts(pages) == setup.resolved.group_pages
    assert setup.memory.kv_bytes == sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages)
    )
    few = shallow(setup)
    assert few.resolved.windows == (None,)
    assert page_counts(abstract_pages(few)) == (setup.resolved.num_pages,)
    make_programs(few).compile([make_programs(few).largest])


def test_another_model_length_is_another_set_of_programs(tiny_dir: str) -> None:
    before, _ = decide(tiny_dir)
    config = EngineConfig(
        model=tiny_dir, max_model_len=32, max_num_seqs=2, max_num_batched_tokens=16
    )
    other = resolve(config, weights.ModelFiles(tiny_dir), [make_mesh(1)])
    folders = [make_programs(setup).executables.exports for setup in (before, other, before)]
    assert folders[0] is not None
    assert folders[0].folder == folders[2].folder != folders[1].folder  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "wishes",
    [{"num_gpu_blocks_override": 40}, {"kv_cache_memory_bytes": 2**20}, {"enforce_eager": True}],
)
def test_a_pool_that_was_asked_for_is_not_fit_pool(tiny_dir: str, wishes: dict) -> None:
    setup, config = decide(tiny_dir, **wishes)
    programs = make_programs(setup)
    assert fit_pool(setup, programs, config) == (setup, programs)


def test_a_cache_that_is_no_local_folder_keeps_no_programs(tiny_dir: str) -> None:
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
    assert make_programs(decide(tiny_dir)[0]).executables.exports is None


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


@pytest.mark.slow
def test_a_small_pool_leaves_a_step_more_than_was_reserved_and_a_full_one_does_not(
    tiny_dir: str,
) -> None:
    setup, _ = decide(tiny_dir, num_gpu_blocks_override=40)
    budget = replace(setup.memory.budget, workspace=0, spare=0)
    setup = replace(setup, memory=replace(setup.memory, budget=budget))
    programs = make_programs(setup)
    programs.compile([programs.largest, *programs.largest_others])
    check_largest_step(setup, programs)
    pages = budget.for_pages // setup.need.group_bytes
    full = replace(
        setup,
        memory=replace(setup.memory, num_pages=pages, kv_bytes=pages * setup.need.group_bytes),
    )
    with pytest.raises(ConfigError, match="the largest step needs"):
        check_largest_step(full, programs)


@pytest.mark.parametrize(
    ("vocab_size", "backend", "samplers"), [(1024, "mosaic_gpu", 2), (1000, "reference", 3)]
)
def test_the_draw_kernel_is_left_out_where_it_does_not_take_the_vocabulary(
    tiny_dir: str, vocab_size: int, backend: str, samplers: int
) -> None:
    programs = make_programs(decide(tiny_dir)[0])
    model = replace(programs.shapes.model, backend="mosaic_gpu")
    other = replace(programs.shapes, model=model, vocab_size=vocab_size)
    assert (other.draw_backend, len(other.samplers)) == (backend, samplers)
