"""Models with more rows of logits than their tokenizer has tokens, and with fewer.

As in transformers, every row of the configuration's vocabulary can be drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.grammar.checker import Checker
from jaxllm.grammar.structure import StructuredOutputsParams
from jaxllm.messages import GenerateRequest, RequestError
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from jaxllm.tokenizer import Tokenizer
from tests.engine.conftest import TINY, collect, write_random

MakeEngine = Callable[..., Engine]
TEXT = "The question is about numbers and words"
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def grammar() -> Iterator[str]:
    """One that has one text."""
    checker = Checker({})
    yield checker.compile_params(StructuredOutputsParams(choice=[TEXT]))
    checker.end_processes()


def said(
    engine: Engine, params: SamplingParams, grammar: str | None = None
) -> tuple[list[int], str]:
    """Tokens and text."""
    asked = GenerateRequest(id="0", prompt=Prompt([1, 2, 3]), params=params, grammar=grammar)
    deltas = collect(engine, [asked])
    return [id for each in deltas for id in each.token_ids], "".join(each.text for each in deltas)


def test_a_row_without_a_token_can_be_drawn_and_has_no_text(
    make_engine: MakeEngine, tmp_path: Path, repo: Path, grammar: str
) -> None:
    engine = make_engine(model=write_random(tmp_path, repo), skip_tokenizer_init=False)
    tokens, last = Tokenizer.load(tmp_path).backend.get_vocab_size(), 799
    assert tokens < last < engine.resolved.vocab_size
    asked = SamplingParams(temperature=0, max_tokens=3, logit_bias={last: 100.0}, ignore_eos=True)
    assert said(engine, asked) == ([last] * 3, "")
    ids, text = said(engine, GREEDY, grammar)
    assert text == TEXT and max(ids) < tokens


def test_a_token_without_a_row_is_refused_in_prompts_and_never_forced(
    make_engine: MakeEngine, tmp_path: Path, repo: Path, grammar: str
) -> None:
    rows = 448
    write_random(tmp_path, repo)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"vocab_size": rows}))
    engine = make_engine(model=str(tmp_path), skip_tokenizer_init=False)
    ids = Tokenizer.load(tmp_path).encode(TEXT)
    assert max(ids) >= rows
    with pytest.raises(RequestError, match=rf"holds token id {max(ids)}; ids are 0 to {rows - 1}"):
        engine.add(GenerateRequest(id="1", prompt=Prompt(ids), params=GREEDY))
    found, text = said(engine, GREEDY, grammar)
    assert text == TEXT and max(found) < rows
    engine.scheduler.check()
