"""The offline figures: what a part measures, on an engine that keeps time itself; and one small run
of the real one."""

from __future__ import annotations

import json
import sys
import types

import pytest

from benchmarks import engine, import_driver, shapes
from benchmarks.engine import CACHED, MODES, SMALL, UNCACHED, Bench


class Params:
    """Sampling parameters as given."""

    def __init__(self, **given: object):
        self.given = given


class FakeLLM:
    """Generates what was asked for and moves a clock: 1 s a call, 1 ms a prompt token that is new,
    10 ms an output token."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[list[Params]] = []
        self.seen: set[int] = set()

    def generate(self, prompts, params, use_tqdm):
        self.calls.append(params)
        new = [
            token
            for prompt in prompts
            for token in prompt["prompt_token_ids"]
            if token not in self.seen
        ]
        self.seen.update(new)
        longest = max(p.given["max_tokens"] for p in params)
        self.now += 1 + len(new) / 1000 + longest / 100
        return [
            types.SimpleNamespace(
                outputs=[types.SimpleNamespace(token_ids=[0] * p.given["max_tokens"])]
            )
            for p in params
        ]


@pytest.fixture
def bench(monkeypatch) -> Bench:
    llm = FakeLLM()
    monkeypatch.setattr(engine.time, "perf_counter", lambda: llm.now)
    return Bench(llm, Params, SMALL, vocab=10**6)


def test_tpot_is_the_slope_between_two_lengths_alone(bench):
    bench.llm.seen.update(range(10**6))  # prefill costs nothing
    assert [(row["batch"], row["value"]) for row in bench.tpot()] == [(1, 10.0), (4, 10.0)]
    assert [(row["batch"], row["context"], row["value"]) for row in bench.contexts()] == [
        (1, 64, 10.0),
        (4, 64, 10.0),
    ]


def test_ttft_is_one_prompt_and_one_token(bench):
    bench.llm.seen.update(range(10**6))
    assert [(row["prompt"], row["value"]) for row in bench.ttft()] == [(16, 1010.0), (64, 1010.0)]
    assert {len(call) for call in bench.llm.calls} == {1}


def test_a_cached_prompt_keeps_its_beginning_and_changes_its_end(bench):
    (row,) = bench.cached()
    # 16 new tokens at 1 ms, bar one that was drawn before
    assert row["value"] == pytest.approx(1000 + 10 + 16, abs=1.5)


def test_throughput_counts_output_tokens(bench):
    greedy, sampled = bench.throughput()
    asked = [p.given["max_tokens"] for p in bench.llm.calls[0]]
    # The better of two: the second, all seen
    assert greedy["value"] == pytest.approx(sum(asked) / (1 + max(asked) / 100), rel=1e-3)
    assert [call[0].given["temperature"] for call in bench.llm.calls] == [0.0, 0.0, 0.6, 0.6]


def test_every_mode_runs_alone_and_the_sampling_modes_in_one_batch(bench):
    assert [row["mode"] for row in bench.modes()] == [*MODES, "mixed"]
    last = [p.given for p in bench.llm.calls[-1]]
    assert {given.get("min_p") for given in last} == {None, 0.05} and {
        given.get("seed") for given in last
    } == {None, 1}
    assert all(given["ignore_eos"] for given in last)


def test_an_output_that_ended_early_is_an_error(bench, monkeypatch):
    monkeypatch.setattr(
        bench.llm,
        "generate",
        lambda *a, **k: [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[0])])],
    )
    with pytest.raises(RuntimeError, match="before its length"):
        bench.seconds([[1, 2]], 5)


def test_parts_that_need_different_caching_are_refused_together(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["engine", "--parts", f"{UNCACHED[0]},{CACHED[0]}"])
    with pytest.raises(SystemExit):
        engine.main()
    assert "--parts must be of" in capsys.readouterr().err


def test_a_shape_brings_random_weights_and_no_tokenizer_and_other_models_nothing():
    options = shapes.engine_options("shape:tiny")
    assert options["load_format"] == "dummy" and options["skip_tokenizer_init"]
    assert shapes.engine_options("demo") == {"model": "demo"}
    with pytest.raises(SystemExit, match="one of qwen"):
        shapes.engine_options("shape:gpt-5")


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_every_shape_is_one_that_the_model_families_know(name):
    from jaxllm.models import make_spec
    from jaxllm.models.config.build import outline, rules

    spec = make_spec(shapes.ALWAYS | shapes.SHAPES[name])
    assert rules(spec, outline(spec, 1, "bfloat16"))


def test_a_shape_s_tokenizer_has_a_word_for_every_token(tmp_path):
    from jaxllm.tokenizer import Tokenizer

    directory = shapes.write("tiny", tmp_path)
    shapes.write_tokenizer(directory)
    assert Tokenizer.load(str(directory)).encode("t7 t2047") == [7, 2047]


@pytest.mark.slow
def test_the_real_engine_gives_every_figure_and_its_record_can_be_imported(
    tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out.json"
    options = [
        "--model",
        "shape:tiny",
        "--small",
        "--output-json",
        str(out),
        "--compilation-cache-dir",
        str(tmp_path / "cache"),
    ]
    monkeypatch.setattr(sys, "argv", ["engine", *options])
    engine.main()
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    imported = list(import_driver.read(out, "never"))
    assert [row["figure"] for row in printed] == [row["figure"] for row in imported]
    assert {row["figure"] for row in imported} == {
        "startup_s",
        "kv_tokens",
        "ttft_ms",
        "tpot_ms",
        "throughput",
    }
    assert all(row["value"] > 0 for row in imported)
