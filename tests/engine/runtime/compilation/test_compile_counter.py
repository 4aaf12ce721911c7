"""Compilations are counted for the engine that makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime.compilation.compile_counter import CompileCounter
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect


def compile_one(size: int) -> None:
    jax.jit(lambda x: x * size).lower(jnp.float32(1)).compile()


def test_a_counter_counts_what_is_compiled_while_its_thread_has_entered_it() -> None:
    outer, inner = CompileCounter(), CompileCounter()
    compile_one(1001)
    with outer:
        compile_one(1002)
        with inner:
            compile_one(1003)
            compile_one(1004)
        elsewhere = threading.Thread(target=compile_one, args=(1005,))
        elsewhere.start()
        elsewhere.join()
    compile_one(1006)
    assert (outer.compiles, inner.compiles) == (1, 2)
    inner.warmed_up()
    assert inner.since_start == 0
    with inner:
        compile_one(1007)
    assert (inner.since_start, inner.compiles) == (1, 3)


@pytest.mark.slow
def test_an_engine_does_not_count_compilations_of_another_or_of_its_caller(
    make_engine: Callable[..., Engine],
) -> None:
    engine, other = make_engine(), make_engine(enforce_eager=True, max_num_seqs=3)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    prompt = [1, 2, 3]
    # Engines of tests compile a program on its first use
    collect(engine, [GenerateRequest(id="warm", prompt=Prompt(prompt), params=params)])
    before = engine.stats().compiles_after_warmup
    engine.add(GenerateRequest(id="first", prompt=Prompt(prompt), params=params))
    other.add(GenerateRequest(id="second", prompt=Prompt(prompt), params=params))
    found = other.runner.programs.executables.compiles
    assert engine.runner.compiles is not found
    while engine.has_work or other.has_work:
        engine.step()
        compile_one(1008)
        with found:
            compile_one(1009)
        other.step()
    assert engine.stats().compiles_after_warmup == before
    assert found.compiles > 0


def test_a_compilation_inside_a_step_is_counted(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    before, collect_step = engine.stats().compiles_after_warmup, engine.runner.collect

    def compiling(result: object) -> object:
        compile_one(1010)
        return collect_step(result)  # type: ignore[arg-type]

    engine.runner.collect = compiling  # type: ignore[method-assign, assignment]
    try:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        collect(engine, [GenerateRequest(id="r", prompt=Prompt([1, 2]), params=params)])
    finally:
        engine.runner.collect = collect_step  # type: ignore[method-assign]
    assert engine.stats().compiles_after_warmup > before
