"""Programs made in other processes: the same ones, and a worker that fails costs time only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import jax
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.runtime.compilation.exports import export
from jaxllm.engine.runtime.compilation.xla_options import Entry, XlaOptions
from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.startup import compile_workers as module
from jaxllm.engine.startup.compile_workers import (
    DEVICE_BYTES,
    OWN_BYTES,
    CompileWorkers,
    WorkerSpec,
)
from jaxllm.engine.startup.lattice import Lattice, make_programs, plan_lattice
from jaxllm.mesh import make_mesh, make_stage_meshes
from tests.engine.startup.decisions import decide

pytestmark = pytest.mark.usefixtures("cache")


def compile_with(workers: int, tiny_dir: str, devices: int = 1) -> Programs:
    """The samplers and one forward of the smallest lattice, compiled with so many workers."""
    config = EngineConfig(
        model=tiny_dir,
        max_model_len=32,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=8,
    )
    setup = decide(config, tiny_dir, [make_mesh(devices)]).lattice
    programs = make_programs(setup)
    with CompileWorkers() as running:
        running.configure(WorkerSpec(workers))
        running.start(setup, programs, programs.early_keys(likely=False))
        running.start(setup, programs, programs.lattice)
        programs.compile([programs.largest, programs.largest_others[0]])
    return programs


def opcount(programs: Programs) -> list[tuple[str, int]]:
    """Every compiled program by name, with the number of its instructions."""
    return [
        (programs.name(key), (programs.get(key).as_text() or "").count(" = "))
        for key in [programs.largest, programs.largest_others[0]]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_workers_lower_the_programs_that_the_engine_would(
    tiny_dir: str, devices: int, cache: Path
) -> None:
    alone = compile_with(0, tiny_dir, devices)
    kept = {path.name: path.stat().st_size for path in cache.rglob("*.stablehlo")}
    for path in cache.rglob("*.stablehlo"):
        path.unlink()
    together = compile_with(2, tiny_dir, devices)
    assert set(together.executables.coming) >= {path.removesuffix(".stablehlo") for path in kept}
    assert all(
        future.done()
        for name, future in together.executables.coming.items()
        if f"{name}.stablehlo" in kept
    )
    assert opcount(together) == opcount(alone)


@pytest.mark.slow
def test_workers_make_what_needs_no_pages_first_and_then_the_rest_for_the_pool_that_was_found(
    tiny_dir: str,
) -> None:
    options = {
        "model": tiny_dir,
        "max_model_len": 32,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 16,
    }
    estimated, found = (
        decide(EngineConfig(**options, num_gpu_blocks_override=pages), tiny_dir).lattice  # type: ignore[arg-type]
        for pages in (8, 12)
    )
    programs = make_programs(estimated)
    executables, first = programs.executables, programs.early_keys(likely=False)
    assert {key[0] for key in first} == {
        "sample",
        "process_logits",
        "logprobs",
        "prompt_logprobs",
        "set_slot",
        "apply_token_bitmask",
        "update_slots",
    }
    assert set(first[: len(programs.largest_others)]) == set(programs.largest_others)
    with CompileWorkers(3) as running:
        running.configure(WorkerSpec(2))
        running.start(estimated, programs, first)
        early = set(executables.coming)
        assert early == {programs.name(key) for key in first if programs.is_kept(key)}
        programs = make_programs(found, executables)
        running.start(found, programs, programs.lattice)
        later = set(executables.coming) - early
        assert later == {
            programs.name(key) for key in programs.lattice if key[0] in ("decode", "extend")
        }
        for made in executables.coming.values():
            made.result(120)
    assert executables.exports is not None
    assert all(executables.exports.has(name) for name in early | later), (
        "by workers: nothing was compiled here"
    )


def stages_of(tiny_dir: str, stages: int, tensor: int = 1, **wishes: int) -> list[Lattice]:
    """The decisions of each stage of a pipeline."""
    meshes = make_stage_meshes(tensor, stages)
    usual = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 8}
    config = EngineConfig(
        model=tiny_dir,
        max_model_len=32,
        max_num_seqs=2,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        **(usual | wishes),
    )
    model, memory, _ = decide(config, tiny_dir, meshes)
    return [plan_lattice(stage, memory) for stage in model.own_stages()]


def lowered(programs: Programs) -> str:
    recipe = programs.recipe(programs.largest)
    return export(recipe.function, recipe.arguments, "cpu").mlir_module()


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_worker_rebuilds_the_programs_of_each_stage_under_the_names_that_the_engine_asks_for(
    tiny_dir: str, tensor: int
) -> None:
    found = []
    for setup in stages_of(tiny_dir, 2, tensor):
        programs = make_programs(setup)
        again = module.rebuild(json.loads(module._task(setup, programs)))
        ours, theirs = programs.executables.exports, again.executables.exports
        assert ours is not None and theirs is not None and theirs.folder == ours.folder
        assert [*map(again.name, again.lattice)] == [*map(programs.name, programs.lattice)]
        made, text = (lowered(each) for each in (again, programs))  # a text names lines of code
        assert made == text
        found.append((ours.folder, text))
    (first, embeds), (last, draws) = found
    assert first != last and embeds != draws


@pytest.mark.slow
def test_workers_serve_all_stages_that_compile_at_once(tiny_dir: str) -> None:
    stages = [(setup, make_programs(setup)) for setup in stages_of(tiny_dir, 2)]
    with CompileWorkers() as running:
        running.configure(WorkerSpec(2))
        with ThreadPoolExecutor(2) as pool:
            each = [
                pool.submit(running.start, setup, programs, programs.lattice)
                for setup, programs in stages
            ]
            assert [one.result() for one in each] == [None, None]
        for _, programs in stages:
            wanted = {programs.name(key) for key in programs.lattice if programs.is_kept(key)}
            executables = programs.executables
            assert executables.coming.keys() == wanted
            for made in executables.coming.values():
                made.result(120)
            assert executables.exports is not None
            assert all(map(executables.exports.has, wanted))


def test_what_one_stage_no_longer_wants_is_still_made_for_another(
    tiny_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_hand_out", lambda *_: None)  # nobody makes anything
    first, last = stages_of(tiny_dir, 2)
    (_, other) = stages_of(tiny_dir, 2, num_gpu_blocks_override=12)
    programs, others, changed = map(make_programs, (first, last, other))
    with CompileWorkers(1) as running:
        running.start(last, others, others.lattice)
        running.start(first, programs, programs.lattice)
        assert not any(made.done() for made in others.executables.coming.values())
        changed.executables.coming = others.executables.coming
        running.start(other, changed, changed.lattice)
    assert {
        name.partition("-")[0] for name, made in others.executables.coming.items() if made.done()
    } == {"decode", "extend"}
    assert not any(made.done() for made in programs.executables.coming.values())


def test_those_who_are_hired_are_as_many_as_asked_whether_they_were_there_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Ends as soon as it is told nothing more
    monkeypatch.setattr(module.sys, "executable", "/bin/cat")
    monkeypatch.setattr(module, "_START", ())
    for before, hired in [(0, 2), (3, 1), (2, 2), (2, 0)]:
        with CompileWorkers(before) as running:
            first = [worker.process for worker in running._workers]
            assert [process.poll() for process in first] == [None] * before
            running.configure(WorkerSpec(hired, True, "gpu"))
            kept = [worker.process for worker in running._workers]
            assert (len(kept), kept[:before]) == (hired, first[:hired])
            assert all(process.poll() is not None for process in first[hired:])
            assert all(
                process.stdout is not None and process.stdout.readline() == '["gpu", true]\n'
                for process in kept
            )
        assert all(process.poll() is not None for process in kept)


def test_what_is_no_longer_wanted_is_left_and_nobody_waits_for_it(
    tiny_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_hand_out", lambda *_: None)  # nobody makes anything
    options = {
        "model": tiny_dir,
        "max_model_len": 32,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 16,
    }
    likely, found = (
        decide(EngineConfig(**options, num_gpu_blocks_override=pages), tiny_dir).lattice  # type: ignore[arg-type]
        for pages in (8, 12)
    )
    programs = make_programs(likely)
    coming = programs.executables.coming
    with CompileWorkers(1) as running:
        running.start(likely, programs, programs.lattice)
        early = dict(coming)
        assert set(early) == {
            programs.name(key) for key in programs.lattice if programs.is_kept(key)
        }
        programs = make_programs(found, programs.executables)
        running.start(found, programs, programs.lattice)
    assert {name.partition("-")[0] for name, made in early.items() if made.done()} == {
        "decode",
        "extend",
    }
    assert not any(
        made.done()
        for name, made in coming.items()
        if name not in early or name.partition("-")[0] not in ("decode", "extend")
    )


def test_a_worker_that_dies_costs_time_only(tiny_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    programs = compile_with(1, tiny_dir)
    assert programs.executables.lowered == len([programs.largest, programs.largest_others[0]])


def test_nobody_waits_for_workers_whom_no_thread_is_left_to_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    queue = deque((name, Future[None]()) for name in ("decode-1", "decode-2"))
    waited_for = [made for _, made in queue]
    module._hand_out([module._Worker(cast(Any, None))], "{}", queue)
    assert not queue and all(made.done() for made in waited_for)


def test_what_an_earlier_start_kept_is_not_lowered_again(tiny_dir: str) -> None:
    compile_with(0, tiny_dir)
    programs = compile_with(0, tiny_dir)
    assert programs.executables.lowered == 0


@pytest.mark.parametrize(
    ("cores", "platform", "devices", "spare", "crew"),
    [
        (16, "gpu", 1, OWN_BYTES + 10 * DEVICE_BYTES, WorkerSpec(10, True, "gpu")),
        # As many as the device has room for beside the engine
        (64, "gpu", 1, OWN_BYTES + 4 * DEVICE_BYTES, WorkerSpec(4, True, "gpu")),
        (64, "gpu", 1, OWN_BYTES + 4 * DEVICE_BYTES - 1, WorkerSpec(3, True, "gpu")),
        (16, "gpu", 1, 3 * DEVICE_BYTES, WorkerSpec(10)),  # it has none: they lower only
        (16, "gpu", 2, 10 * DEVICE_BYTES, WorkerSpec(10)),
        (4, "gpu", 1, 10 * DEVICE_BYTES, WorkerSpec(0)),
        (16, "tpu", 4, 0, WorkerSpec(10)),
        (64, "cpu", 1, 0, WorkerSpec(0)),
    ],
)
def test_workers_are_for_accelerators_with_cores_and_memory_to_spare(
    cores: int, platform: str, devices: int, spare: int, crew: WorkerSpec
) -> None:
    assert WorkerSpec.within(cores, platform, devices, spare) == crew


def test_the_engine_begins_with_what_xla_tunes(tiny_dir: str) -> None:
    config = EngineConfig(
        model=tiny_dir,
        max_model_len=32,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=8,
    )
    programs = make_programs(decide(config, tiny_dir).lattice)
    programs.executables.platform = "gpu"
    programs.executables._options = XlaOptions(
        (Entry("extend", 1, 9999, {"xla_gpu_autotune_level": 0}),)
    )
    lattice = programs.lattice
    assert [programs.is_tuned(key) for key in lattice] == [
        key[0] in ("decode", "prompt_logprobs") for key in lattice
    ]
    assert lattice[0][0] == "decode"


FIRST_START = """
import sys
from pathlib import Path
from jaxllm.config import EngineConfig
from jaxllm.engine.startup.lattice import make_programs
from jaxllm.engine.startup.program_cache import use_compilation_cache
from jaxllm.engine.startup.compile_workers import CompileWorkers, WorkerSpec
from tests.engine.startup.decisions import decide

use_compilation_cache(sys.argv[2])
limits = {"max_model_len": 32, "max_num_seqs": 1, "max_num_batched_tokens": 16}
config = EngineConfig(model=sys.argv[1], num_gpu_blocks_override=8, **limits)
setup = decide(config, sys.argv[1]).lattice
programs = make_programs(setup)
counter = programs.executables.compiles
with CompileWorkers(1) as running:
    running.configure(WorkerSpec(2, compiling=True))
    running.start(setup, programs, programs.lattice)
    mine = [key for key in programs.lattice if programs.is_kept(key)]
    programs.compile(mine)
print(counter.cache_hits, counter.compiles, len(mine))
"""


@pytest.mark.slow
def test_what_workers_compile_is_found_in_the_cache(
    tiny_dir: str, tmp_path: Path, repo: Path
) -> None:
    # A process of its own: JAX opens the cache's directory once.
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("JAX_COMPILATION_CACHE")
    }
    done = subprocess.run(
        [sys.executable, "-c", FIRST_START, tiny_dir, str(tmp_path / "cache")],
        env=env,
        cwd=repo,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    hits, compiles, wanted = map(int, done.stdout.split())
    assert hits == compiles == wanted


@pytest.mark.slow
def test_workers_lower_with_the_settings_of_the_engine(tiny_dir: str, cache: Path) -> None:
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        programs = compile_with(1, tiny_dir)
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    name, exports = (
        programs.name([programs.largest, programs.largest_others[0]][0]),
        programs.executables.exports,
    )
    assert exports is not None and name in programs.executables.coming
    kept = exports.load(name)
    assert kept is not None
    assert "HIGHEST" in kept.mlir_module()
