"""Programs lowered in other processes: the same ones, and a worker that fails costs time only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine import lowering
from jaxllm.engine.lowering import Lowering, worker_count
from jaxllm.engine.programs import Programs
from jaxllm.engine.resolve import resolve
from jaxllm.engine.sizing import make_programs
from jaxllm.mesh import make_mesh


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    """Programs are kept in a folder of the test's own."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def compile_with(workers: int, tiny_dir: str, devices: int = 1) -> Programs:
    """The samplers and one forward of the smallest lattice, compiled with so many workers."""
    config = EngineConfig(model=tiny_dir, max_model_len=32, max_num_seqs=1, max_num_batched_tokens=16, num_gpu_blocks_override=8)
    setup = resolve(config, Path(tiny_dir), make_mesh(devices))
    programs = make_programs(setup)
    with Lowering(workers) as running:
        running.start(setup, programs)
        programs.compile([programs.largest, programs.largest_sampler])
    return programs


def opcount(programs: Programs) -> list[tuple[str, int]]:
    """Every compiled program by name, with the number of its instructions."""
    return [(programs.name(key), (programs.get(*key).as_text() or "").count(" = ")) for key in [programs.largest, programs.largest_sampler]]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_workers_lower_the_programs_that_the_engine_would(tiny_dir: str, devices: int, cache: Path) -> None:
    alone = compile_with(0, tiny_dir, devices)
    kept = {path.name: path.stat().st_size for path in cache.rglob("*.stablehlo")}
    for path in cache.rglob("*.stablehlo"):
        path.unlink()
    together = compile_with(2, tiny_dir, devices)
    assert set(together.executables.coming) >= {path.removesuffix(".stablehlo") for path in kept}
    assert all(future.done() for name, future in together.executables.coming.items() if f"{name}.stablehlo" in kept)
    assert opcount(together) == opcount(alone)


def test_a_worker_that_dies_costs_time_only(tiny_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering.sys, "executable", "/bin/false")
    programs = compile_with(1, tiny_dir)
    assert programs.executables.lowered == len([programs.largest, programs.largest_sampler])


def test_what_an_earlier_start_kept_is_not_lowered_again(tiny_dir: str) -> None:
    compile_with(0, tiny_dir)
    programs = compile_with(0, tiny_dir)
    assert programs.executables.lowered == 0


@pytest.mark.parametrize(("cores", "platform", "count"), [(16, "gpu", 5), (64, "gpu", 6), (4, "gpu", 0), (64, "cpu", 0)])
def test_workers_are_for_accelerators_with_cores_to_spare(cores: int, platform: str, count: int) -> None:
    assert worker_count(cores, platform) == count


@pytest.mark.slow
def test_workers_lower_with_the_settings_of_the_engine(tiny_dir: str, cache: Path) -> None:
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        programs = compile_with(1, tiny_dir)
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    name, exports = programs.name([programs.largest, programs.largest_sampler][0]), programs.executables.exports
    assert exports is not None and name in programs.executables.coming
    kept = exports.load(name)
    assert kept is not None
    assert "HIGHEST" in kept.mlir_module()
