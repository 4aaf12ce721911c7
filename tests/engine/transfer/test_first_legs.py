"""First legs that end or fail at odd moments leave nothing that others would wait for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxllm.grammar.checker import Checker
from jaxllm.grammar.structure import StructuredOutputsParams
from tests.engine.conftest import collect, tokens_of, write_random
from tests.engine.transfer.conftest import PREFILL, PROMPT, close, request


@pytest.fixture(scope="module")
def random_dir(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> str:
    return write_random(tmp_path_factory.mktemp("random"), repo)


@pytest.fixture(scope="module")
def sentence() -> Iterator[str]:
    """A grammar that allows one sentence."""
    checker = Checker({})
    yield checker.compile_params(StructuredOutputsParams(regex="the quick brown fox jumps"))
    checker.end_processes()


@pytest.mark.parametrize("early", [False, True])
def test_a_first_leg_whose_grammar_forces_its_tokens(make, random_dir, sentence, early):
    engine = make(
        "kv_producer", early=early, model=random_dir, skip_tokenizer_init=False, max_model_len=256
    )
    one = request(PROMPT[:57], params=PREFILL, shares_pages=True, grammar=sentence)
    deltas = collect(engine, [one])
    assert [delta.finish_reason for delta in deltas] == ["length"]
    engine.scheduler.check()
    assert not engine.transfer.exporter.shelf._announced and not engine.transfer.exporter._announced
    close(engine)


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let the next call fail."""
    call = getattr(owner, name)

    def fails(*arguments: Any) -> Any:
        monkeypatch.setattr(owner, name, call)
        raise RuntimeError("injected")

    monkeypatch.setattr(owner, name, fails)


@pytest.mark.parametrize("name", ["collect", "take_out", "draw", "forward"])
def test_a_step_that_fails_after_an_early_answer(make, monkeypatch, name):
    engine = make("kv_producer", early=True, async_scheduling=False)
    alone = tokens_of(collect(engine, [request(PROMPT)]), "r")
    engine.reset_prefix_cache()
    fail_once(monkeypatch, engine.runner, name)
    engine.add(request(PROMPT, params=PREFILL, shares_pages=True))
    with pytest.raises(RuntimeError, match="injected"):
        collect(engine, [])
    exporter = engine.transfer.exporter
    assert not (exporter._begun or exporter._answered or exporter._announced or exporter._taken)
    assert not (exporter.shelf._announced or exporter.shelf._expected)
    assert tokens_of(collect(engine, [request(PROMPT)]), "r") == alone
    close(engine)


def test_nobody_waits_for_pages_of_a_request_that_was_lost_before_its_grammar(
    make, random_dir, sentence, monkeypatch
):
    engine = make("kv_producer", model=random_dir, skip_tokenizer_init=False, max_model_len=256)
    fail_once(monkeypatch, engine.runner, "forward")
    engine.add(request(PROMPT))
    grammars = engine.grammars
    monkeypatch.setattr(grammars, "pop_built", list)
    engine.add(replace(request(PROMPT, shares_pages=True, grammar=sentence), id="lost"))
    with pytest.raises(RuntimeError, match="injected"):
        engine.step()
    assert not engine.has_work
    assert not engine.transfer.exporter._announced and not engine.transfer.exporter.shelf._announced
    close(engine)
