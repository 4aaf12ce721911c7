"""Structured output beside what else decides about tokens: bans, stops, free text; and tokens that
a grammar forces."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxllm import LLM
from tests.engine.conftest import write_random
from tests.engine.constraints.test_grammars import (
    EOS,
    PROMPT,
    SCHEMAS,
    assert_valid,
    compact,
    load,
    params,
    say,
)
from tests.sampling.test_distribution import chi_square, limit


@pytest.fixture(scope="module")
def random_dir(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> str:
    return write_random(tmp_path_factory.mktemp("random"), repo)


@pytest.fixture(scope="module")
def llm(random_dir: str) -> LLM:
    return load(random_dir)


def test_bans_and_grammar_hold_together(llm: LLM) -> None:
    a, b = (llm.get_tokenizer().convert_tokens_to_ids(c) for c in "ab")
    assert (
        say(llm, params({"regex": "[abc]{5}"}, allowed_token_ids=[a, b, *EOS]))[0][0].strip("ab")
        == ""
    )
    assert say(llm, params({"regex": "a{2}b?"}, allowed_token_ids=[a])) == [("aa", "stop")], (
        "it may end there, and cannot go on"
    )
    (output,) = llm.generate(
        [PROMPT], params({"regex": "c"}, allowed_token_ids=[a, b]), use_tqdm=False
    )
    assert output.outputs[0].finish_reason == "error" and "allow no token" in (
        output.outputs[0].error or ""
    )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"async_scheduling": False},
        pytest.param({"num_gpu_blocks_override": 24, "max_model_len": 320}, marks=pytest.mark.slow),
    ],
)
def test_forced_tokens_are_said_in_fewer_steps_and_are_the_same(
    llm: LLM, random_dir: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = load(random_dir, **change) if change else llm
    names = ("lamp", "point", "exam", "colour", "shift", "budget")
    wanted = [params(compact(name), max_tokens=250, n=1 + (name == "lamp")) for name in names] + [
        params(max_tokens=60, ignore_eos=True)
    ]

    def steps_of() -> tuple[list[tuple[str, str | None]], int]:
        before = other.engine.stats().steps
        return say(other, *wanted), other.engine.stats().steps - before

    said, steps = steps_of()
    monkeypatch.setattr("jaxllm.engine.steps.constrained.MIN_JUMP", 10**9)
    assert steps_of()[0] == said
    assert steps_of()[1] > 1.2 * steps
    for name, one in zip(("lamp", *names), said, strict=False):
        assert_valid(one, SCHEMAS[name])
    assert other.engine.stats().free_pages == other.engine.stats().num_pages
    other.engine.scheduler.check()


def test_forced_tokens_may_end_the_request(llm: LLM) -> None:
    sentence = "the quick brown fox jumps over the lazy dog"
    assert say(llm, params({"choice": [sentence]})) == [(sentence, "stop")]
    assert say(llm, params({"choice": [sentence]}, stop=["fox"])) == [("the quick brown ", "stop")]
    assert say(llm, params({"choice": [sentence]}, max_tokens=6))[0][1] == "length"
    ((text, _),) = say(llm, params({"choice": [sentence]}, max_tokens=6))
    assert sentence.startswith(text)


@pytest.mark.parametrize("logprobs", [None, 0], ids=["forced", "drawn"])
def test_a_forced_text_may_look_like_a_special_token(llm: LLM, logprobs: int | None) -> None:
    text = "then <tool_call> and <|im_end|> are text"
    assert say(llm, *[params({"choice": [text]}, logprobs=logprobs)] * 2) == [(text, "stop")] * 2


@pytest.mark.parametrize("logprobs", [None, 0], ids=["forced", "drawn"])
def test_a_forced_token_that_stops_too_early_ends_the_request_however_it_is_said(
    llm: LLM, logprobs: int | None
) -> None:
    (stop,) = llm.get_tokenizer().encode("q", add_special_tokens=False)
    whole, head = "zzzqqqqzzzz", "zzz"

    def said(**options: Any) -> tuple[str, str | None, int | str | None]:
        wanted = params(
            {"choice": [whole]},
            temperature=0,
            max_tokens=20,
            logprobs=logprobs,
            stop_token_ids=[stop],
            **options,
        )
        (choice,) = llm.generate([PROMPT], wanted, use_tqdm=False)[0].outputs
        assert (choice.error is not None) == (choice.finish_reason == "error")
        assert choice.error is None or "min_tokens" in choice.error
        return choice.text, choice.finish_reason, choice.stop_reason

    assert said(min_tokens=8) == (head, "error", None), (
        "the grammar leaves the stop token alone, and min_tokens forbids it"
    )
    assert said(min_tokens=len(head)) == said() == (head, "stop", stop)
    assert said(min_tokens=len(head), include_stop_str_in_output=True) == (head + "q", "stop", stop)


@pytest.mark.parametrize("kind", ["choice", "more than one stop", "bad words"])
def test_options_that_leave_no_token_cost_nobody_a_cached_prefix(llm: LLM, kind: str) -> None:
    a, q, z = (llm.get_tokenizer().encode(letter, add_special_tokens=False)[0] for letter in "aqz")
    options: dict[str, Any] = {"temperature": 0, "min_tokens": 4, "stop_token_ids": [q, z]}
    if kind == "bad words":
        options |= {"allowed_token_ids": [a, q, z], "bad_words": ["aa"]}
    wanted = params(
        {"choice": ["aq"]}
        if kind == "choice"
        else {"regex": "a[qz]"}
        if kind == "more than one stop"
        else None,
        **options,
    )
    shared = [{"prompt_token_ids": list(range(100, 150))}]

    def cached() -> int | None:
        return llm.generate(shared, params(max_tokens=2), use_tqdm=False)[0].num_cached_tokens

    cached()
    before = cached()
    (choice,) = llm.generate(shared, wanted, use_tqdm=False)[0].outputs
    assert choice.finish_reason == "error" and "min_tokens forbids" in (choice.error or "")
    assert cached() == before and before


def test_structural_tags_are_free_text_until_a_trigger_and_then_follow_their_schema(
    llm: LLM,
) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["x"],
    }
    schema["additionalProperties"] = False
    tags = {"<f>": (schema, "</f>"), "<g>": ({"type": "boolean"}, "</g>")}
    structures = [
        {"begin": begin, "schema": content, "end": end} for begin, (content, end) in tags.items()
    ]
    less, f, g = (llm.get_tokenizer().convert_tokens_to_ids(c) for c in "<fg")
    wanted = params(
        {"structural_tag": {"structures": structures, "triggers": ["<"]}},
        n=12,
        max_tokens=90,
        logit_bias={less: 6, f: 6, g: 6},
        ignore_eos=True,
    )
    found: dict[str, int] = dict.fromkeys(tags, 0)
    free = 0
    for choice in llm.generate([PROMPT], wanted, use_tqdm=False)[0].outputs:
        pieces = re.split(r"(<[fg]>.*?</[fg]>)", choice.text, flags=re.DOTALL)
        free += sum(bool(piece) for piece in pieces[::2])
        for piece in pieces[1::2]:
            content, end = tags[piece[:3]]
            assert piece.endswith(end)
            jsonschema.validate(json.loads(piece[3 : -len(end)]), content)
            found[piece[:3]] += 1
        assert all("<" not in piece for piece in pieces[:-1:2])
        assert re.fullmatch(r"[^<]*(<([fg](>.*)?)?)?", pieces[-1], re.DOTALL), (
            "the last tag may be cut"
        )
    assert free > 3 and min(found.values()) > 3, (free, found)


@pytest.mark.slow
def test_draws_under_a_grammar_and_under_bans_follow_the_models_distribution_of_what_is_left(
    random_dir: str,
) -> None:
    llm = load(random_dir, max_num_seqs=32, max_logprobs=800)
    tokens = llm.get_tokenizer().convert_ids_to_tokens(range(768))
    first = (
        llm.generate([PROMPT], params(max_tokens=1, logprobs=800), use_tqdm=False)[0]
        .outputs[0]
        .logprobs
    )
    assert first is not None
    own_V = np.exp(np.array([first[0][id].logprob for id in range(800)], np.float64))
    letters = [id for id, token in enumerate(tokens) if re.fullmatch("[a-z]", token)]
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"structure": {"regex": "[a-z]"}}, letters),
        (
            {"structure": {"regex": "[a-z]"}, "bad_words": ["e", "x", "a b"]},
            [id for id in letters if tokens[id] not in "ex"],
        ),
        (
            {"bad_words": [tokens[id] for id in letters[3:]], "allowed_token_ids": letters},
            letters[:3],
        ),
    ]
    for options, left in cases:
        wanted = [params(**options, seed=seed, n=128, max_tokens=1) for seed in range(5)]
        said = [
            choice.token_ids[0]
            for output in llm.generate([PROMPT] * 5, wanted, use_tqdm=False)
            for choice in output.outputs
        ]
        probs_V = np.where(np.isin(np.arange(800), left), own_V, 0)
        statistic, freedom = chi_square(np.array(said), probs_V / probs_V.sum())
        assert freedom == len(left) - 1
        assert statistic < limit(freedom)
