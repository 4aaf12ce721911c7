"""The start of a pipeline: its stages load and compile at once, and end as one when one fails."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.runtime.lattice import Key, Programs
from jaxllm.engine.runtime.pipeline.stages import EarlierStages
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.startup.report import Report
from jaxllm.engine.startup.started import Started, start
from jaxllm.engine.startup.together import Together
from jaxllm.engine.startup.weight_source import WeightSource

PATIENCE = 60  # seconds, which nothing here takes unless it fails


def begin(tiny_dir: str, cache: Path, report: Report | None = None) -> Started:
    """Start the tiny model in two stages."""
    config = EngineConfig(
        model=tiny_dir,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=32,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        num_gpu_blocks_override=8,
        pipeline_parallel_size=2,
        compilation_cache_dir=str(cache),
    )
    return start(config, report or Report())


def test_stages_load_and_compile_at_once_and_are_reported_as_one(
    tiny_dir: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage goes on only once the other one has begun the same, and loading waits for
    compiling to begin."""
    both = {name: threading.Barrier(2) for name in ("load", "compile")}
    compiling, read, told = threading.Event(), WeightSource.read, dict[str, tuple[int, int]]()

    def load(self: WeightSource, *given: Any, **wishes: Any) -> tuple[jax.Array, ...]:
        both["load"].wait(PATIENCE)
        assert compiling.wait(PATIENCE)
        return read(self, *given, **wishes)

    def compile_all(self: Programs, progress: Any) -> None:
        both["compile"].wait(PATIENCE)
        compiling.set()
        progress(len(self.lattice), len(self.lattice))

    class Told(Report):
        def _bar(self, name: str) -> Any:
            return _Bar(name, told)

    monkeypatch.setattr(WeightSource, "read", load)
    monkeypatch.setattr(Programs, "compile_all", compile_all)
    monkeypatch.setattr(Runner, "warm_up", lambda self, deep: None)
    report = Told()
    runner = begin(tiny_dir, cache, report).runner
    assert isinstance(runner, Runner) and isinstance(runner.before, EarlierStages)
    stages = [*runner.before.stages, runner]
    count = sum(len(stage.programs.lattice) for stage in stages)
    assert told["Compiling"] == (count, count)
    assert told["Loading weights"][0] == sum(
        leaf.nbytes for stage in stages for leaf in stage.weights
    )
    assert report.seconds.keys() == {
        *("Loading weights", "Compiling", "Allocating KV pages", "Warming up")
    }


class _Bar:
    """Keeps what a phase told last."""

    def __init__(self, name: str, told: dict[str, tuple[int, int]]):
        self.name, self.told = name, told

    def __enter__(self) -> Any:
        return lambda done, total: self.told.update({self.name: (done, total)})

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("what", ["load", "compile"])
def test_a_stage_that_fails_ends_the_start_with_its_own_error_and_leaves_nothing_running(
    what: str, stage: int, tiny_dir: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, begun, note = threading.Event(), list[Key](), Together._fail

    def noted(self: Together, error: BaseException) -> None:
        note(self, error)
        failed.set()

    def load(self: WeightSource, *_: Any, **__: Any) -> tuple[jax.Array, ...]:
        if what == "load" and [model.stage.index for model in self.models] == [stage]:
            raise ConfigError("as the test wants")
        return ()

    def compiling(self: Programs, key: Key) -> Any:
        if what == "compile" and self.shapes.stage.index == stage:
            raise ConfigError("as the test wants")
        assert failed.wait(PATIENCE)
        begun.append(key)
        time.sleep(0.1)  # a program takes a while, and only those that have begun are waited for
        return SimpleNamespace(memory_analysis=lambda: None)

    monkeypatch.setattr(Together, "_fail", noted)
    monkeypatch.setattr(WeightSource, "read", load)
    monkeypatch.setattr(Programs, "_compile", compiling)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="as the test wants"):
        begin(tiny_dir, cache)
    assert set(threading.enumerate()) <= before
    assert len(begun) < 15, "of about 30"
