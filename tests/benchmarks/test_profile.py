"""The table of kernels, and one traced run of the real engine."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import profile
from benchmarks.profile import Event, Kernel, events, kernels, pauses
from jaxllm.engine.runtime.profile import Profiler
from jaxllm.engine.scheduling.buckets import Buckets


def test_a_trace_names_what_ran_the_longest_first(tmp_path):
    multiply = jax.jit(lambda x: jnp.sin(x @ x))
    x = jax.block_until_ready(multiply(jnp.ones((300, 300))))
    profiler = Profiler(str(tmp_path / "traces"))
    profiler.start()
    for _ in range(3):
        jax.block_until_ready(multiply(x))
    profiler.stop()
    ran = events(tmp_path / "traces")
    assert ran == sorted(ran) and all(event.end > event.start for event in ran)
    found = kernels(ran)
    assert found and all(
        isinstance(kernel, Kernel) and kernel.seconds > 0 and kernel.calls >= 1 for kernel in found
    )
    assert [k.seconds for k in found] == sorted((k.seconds for k in found), reverse=True)
    assert not any(kernel.name.startswith("Threadpool") for kernel in found)


def test_a_folder_without_traces_has_no_kernels(tmp_path):
    assert kernels(events(tmp_path)) == [] == pauses([])


def test_pauses_are_what_no_kernel_covers_by_the_one_that_ended_last():
    ran = [(0, 10, "gemm"), (2, 3, "copy"), (12, 13, "norm"), (13, 20, "gemm"), (21, 22, "norm")]
    assert pauses([Event(*each) for each in ran]) == [Kernel("gemm", 2, 3)]


@pytest.mark.parametrize("slots", [4, 256, 1000])
def test_few_shapes_hold_prompts_alone_and_beside_all_decodes(slots, monkeypatch):
    monkeypatch.setattr(Buckets, "build", Buckets.build)  # and its restoration afterwards
    profile.few()
    few = Buckets.build(slots, 8192, "gpu")
    assert few.most_tokens(0) == 8192 and few.most_tokens(slots) > 0
    for shape in few.extend:
        assert few.logit_rows(few.fit_extend(shape.tokens, 1, shape.decodes))
    assert few.fit_decode(1) >= slots


def test_the_table_shares_the_time_of_a_step_among_kernels():
    lines = profile.table(
        [Kernel("gemm", 20, 0.006), Kernel("norm", 40, 0.002)], turns=2, top=1
    ).splitlines()
    assert lines[1].split() == ["3.0000", "75.0%", "10.0", "gemm"]
    assert lines[2].split() == ["4.0000", "100%", "30.0", "all"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--prefill"], ["--few"]])
def test_a_traced_run_finds_kernels_and_leaves_the_trace_where_it_was_told(
    tmp_path, monkeypatch, more
):
    monkeypatch.setattr(profile.Buckets, "build", profile.Buckets.build)
    out, traces = tmp_path / "out.json", tmp_path / "traces"
    load = [
        "--model",
        "shape:tiny",
        "--max-model-len",
        "128",
        "--batch-size",
        "2",
        "--input-len",
        "16",
        "--steps",
        "4",
        "--warm-up",
        "1",
    ]
    monkeypatch.setattr(
        sys,
        "argv",
        ["profile", *load, *more, "--output-json", str(out), "--profiler-dir", str(traces)],
    )
    profile.main()
    figures = json.loads(out.read_text())["figures"]
    assert figures["kernel_ms_per_step"] > 0 and figures["kernels"]
    assert figures["untraced"]["ms_per_step"] > 0
    assert list(traces.rglob("*.xplane.pb"))
