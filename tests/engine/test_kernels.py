"""Kernels compiled before the programs that hold them: which they are, and that each is compiled once."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from jaxllm.engine.exports import Exports, export
from jaxllm.engine.kernels import TARGET, KernelCompiler, Kernels, kernels_in
from jaxllm.mesh import make_mesh
from tests.engine.test_lowering import programs_of


@pytest.fixture(scope="module")
def program() -> jax.export.Exported:
    """A decode step lowered for CUDA."""
    programs = programs_of(make_mesh(1), "mosaic_gpu")
    recipe = programs.recipe(("decode", max(programs.buckets.decode)))
    return export(recipe.function, recipe.arguments, "gpu")


def test_the_kernels_of_a_program_are_found_and_kept_whole(program: jax.export.Exported, tmp_path: Path) -> None:
    found = kernels_in(program.mlir_module())
    assert len(found) == program.mlir_module().count(f"@{TARGET}") >= 2
    assert all(len(name) == hashlib.sha256().digest_size and module.startswith(b"ML\xefR") for name, module in found.items())
    exports = Exports(tmp_path, "set")
    assert exports.kernels("decode") == {}
    exports.save("decode", program)
    exports.save_kernels("decode")
    assert exports.kernels("decode") == found


def test_a_kernel_alone_is_called_as_the_program_calls_it(program: jax.export.Exported) -> None:
    wanted = dict([next(iter(kernels_in(program.mlir_module()).items()))])
    compiler = KernelCompiler(SingleDeviceSharding(jax.devices()[0]))
    ((name, module),) = wanted.items()
    text = jax.jit(compiler.alone(name, module)).trace().lower(lowering_platforms=("cuda",)).as_text()
    assert kernels_in(text) == wanted


def test_each_kernel_is_compiled_once_and_whoever_asks_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[bytes] = []
    ready, go = threading.Event(), threading.Event()

    def slow(self: KernelCompiler, name: bytes, module: bytes) -> None:
        ready.set()
        assert go.wait(60)
        compiled.append(name)

    monkeypatch.setattr(KernelCompiler, "_compile", slow)
    compiler = KernelCompiler(SingleDeviceSharding(jax.devices()[0]))
    kernels: Kernels = {b"one": b"", b"two": b""}
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(compiler.compile, kernels) for _ in range(3)]
        assert ready.wait(60)
        assert not any(future.done() for future in asked)
        go.set()
        for future in asked:
            future.result(60)
    assert sorted(compiled) == [b"one", b"two"]


def test_a_kernel_that_does_not_compile_is_left_to_its_program() -> None:
    KernelCompiler(SingleDeviceSharding(jax.devices()[0])).compile({b"x" * 32: b"not a module"})
