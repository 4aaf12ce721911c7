"""Structured output through the engine, with random weights: valid, beside others who notice
nothing, and failing alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jaxllm import (
    LLM,
    GuidedDecodingParams,
    OptionError,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
)
from jaxllm.engine.engine import Engine
from jaxllm.grammar.matcher import Matcher
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from tests.engine.conftest import Outcome, collect, tokens_of, write_random
from tests.engine.few_shapes import few_shapes
from tests.grammar.schemas import every

SCHEMAS = every()
PROMPT = list(range(40, 60))
EOS = [759, 761]


@pytest.fixture(scope="module")
def random_dir(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> str:
    return write_random(tmp_path_factory.mktemp("random"), repo)


def load(random_dir: str, **overrides: Any) -> LLM:
    wishes: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "num_gpu_blocks_override": 600,
        "enforce_eager": True,
    }
    with few_shapes():
        return LLM(random_dir, **(wishes | overrides))


@pytest.fixture(scope="module")
def llm(random_dir: str) -> LLM:
    return load(random_dir)


def params(structure: dict[str, Any] | None = None, **options: Any) -> SamplingParams:
    return SamplingParams(
        **(
            {"temperature": 1.0, "seed": 5, "max_tokens": 1500, "structured_outputs": structure}
            | options
        )
    )


def say(llm: LLM, *wanted: SamplingParams) -> list[tuple[str, str | None]]:
    outputs = llm.generate([PROMPT] * len(wanted), list(wanted), use_tqdm=False)
    return [(choice.text, choice.finish_reason) for output in outputs for choice in output.outputs]


def compact(name: str) -> dict[str, Any]:
    return {"json": SCHEMAS[name], "disable_any_whitespace": True}


def assert_valid(said: tuple[str, str | None], schema: dict[str, Any]) -> None:
    text, reason = said
    assert reason == "stop", text
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def request(
    llm: LLM, id: str, structure: dict[str, Any] | None = None, **options: Any
) -> GenerateRequest:
    """As the engine takes it."""
    grammar = (
        None
        if structure is None
        else llm._checker.compile_params(StructuredOutputsParams(**structure))
    )
    llm._checker.end_processes()
    return GenerateRequest(id=id, prompt=Prompt(PROMPT), params=params(**options), grammar=grammar)


def test_random_weights_give_valid_json(llm: LLM) -> None:
    names = list(SCHEMAS)[3::70]
    for name, said in zip(names, say(llm, *(params(compact(name)) for name in names)), strict=True):
        assert_valid(said, SCHEMAS[name])


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes of a demo that says 200 objects in float32
@pytest.mark.parametrize("model", ["random", "demo"])
def test_two_hundred_schemas_are_followed(random_dir: str, model: str) -> None:
    llm = (
        load(random_dir, max_num_seqs=16)
        if model == "random"
        else LLM("demo", max_model_len=2048, max_num_seqs=16, enforce_eager=True)
    )
    # The demo likes objects, and a tree of them may have no end: it opens those that it must
    opening = [id for text, id in llm.get_tokenizer().get_vocab().items() if "{" in text]
    options = {"temperature": 0.8, "logit_bias": dict.fromkeys(opening, -30.0)}
    said = say(llm, *(params(compact(name), **options) for name in SCHEMAS))
    whole = [
        (schema, one)
        for schema, one in zip(SCHEMAS.values(), said, strict=True)
        if one[1] == "stop"
    ]
    assert len(whole) >= 190, "a number or an address may go on until max_tokens"
    for schema, one in whole:
        assert_valid(one, schema)


def test_every_kind_in_one_batch_and_an_unconstrained_row_beside_them_keeps_its_tokens(
    llm: LLM,
) -> None:
    free = params(max_tokens=40, ignore_eos=True)
    alone = llm.generate([PROMPT], free, use_tqdm=False)[0].outputs[0].token_ids
    kinds: list[dict[str, Any]] = [
        {"regex": r"[a-z]{3,8}-\d{2}"},
        {"choice": ["red", "green", "blue"]},
        {"grammar": 'start: "<" word ("," word){2} ">"\nword: /[a-z]{1,4}/'},
        {"json_object": True, "disable_any_whitespace": True},
        {
            "structural_tag": {
                "structures": [{"begin": "<f>", "schema": SCHEMAS["lamp"], "end": "</f>"}],
                "triggers": ["<f>"],
            }
        },
    ]
    wanted = [params(kind, max_tokens=60) for kind in kinds]
    mixed = llm.generate(
        [PROMPT] * 10, [p for kind in wanted for p in (free, kind)], use_tqdm=False
    )
    assert all(output.outputs[0].token_ids == alone for output in mixed[::2])
    regex, choice, grammar, whole, _ = (output.outputs[0].text for output in mixed[1::2])
    assert re.fullmatch(r"[a-z]{3,8}-\d{2}", regex)
    assert choice in ("red", "green", "blue")
    assert re.fullmatch(r"<[a-z]{1,4}(,[a-z]{1,4}){2}>", grammar)
    assert whole.startswith("{")
    for given, output in zip(wanted, mixed[1::2], strict=True):
        assert (
            llm.generate([PROMPT], given, use_tqdm=False)[0].outputs[0].token_ids
            == output.outputs[0].token_ids
        ), "alone as in the batch"


def test_the_older_names_give_the_same(llm: LLM) -> None:
    new = params(structured_outputs=StructuredOutputsParams(regex="[a-f]{9}"))
    old = params(structured_outputs=None, guided_decoding=GuidedDecodingParams(regex="[a-f]{9}"))
    assert old == new
    assert say(llm, new) == say(llm, old)
    with pytest.raises(OptionError, match="same option"):
        params({"regex": "a"}, guided_decoding=GuidedDecodingParams(regex="a"))


def test_it_ends_with_the_last_token_that_can_be_or_with_the_end_of_sequence(llm: LLM) -> None:
    deltas = collect(
        llm.engine,
        [
            request(llm, "r", {"regex": "ab"}),
            request(llm, "s", {"regex": "a*"}, logit_bias={EOS[0]: 100}),
        ],
    )
    whole, open_ended = Outcome.of(deltas, "r"), Outcome.of(deltas, "s")
    assert (whole.finish_reason, whole.stop_reason) == ("stop", None)
    assert not set(whole.tokens) & set(EOS)
    assert (open_ended.finish_reason, open_ended.stop_reason, open_ended.tokens) == (
        "stop",
        None,
        [EOS[0]],
    )


def test_the_end_of_sequence_is_no_text_even_where_special_tokens_are_shown(llm: LLM) -> None:
    held = params(
        {"regex": "a{2}b*"},
        skip_special_tokens=False,
        logit_bias={EOS[1]: 100},
        ignore_eos=True,
        max_tokens=30,
    )
    assert say(
        llm, params({"regex": "a{2}b*"}, skip_special_tokens=False, logit_bias={EOS[1]: 100})
    ) == [("aa", "stop")]
    assert (
        say(llm, held) == [("aa" + "b" * (30 - len("aa")), "length")]
        or say(llm, held)[0][1] == "length"
    )


def test_min_tokens_holds_the_end_back_while_something_else_can_follow(llm: LLM) -> None:
    eager = {EOS[0]: 100.0}
    ((text, reason),) = say(llm, params({"regex": "(x|y)*"}, min_tokens=7, logit_bias=eager))
    assert (len(text), reason) == (7, "stop")
    assert say(llm, params({"regex": "x{3}"}, min_tokens=9)) == [("xxx", "stop")]
    assert say(llm, params({"regex": "x{0,3}"}, min_tokens=9, ignore_eos=True)) == [("xxx", "stop")]


def test_max_tokens_cuts_it(llm: LLM) -> None:
    assert say(llm, params({"regex": "[ab]{9}"}, max_tokens=1))[0][1] == "length"


def test_stop_strings_and_logprobs_go_with_it(llm: LLM) -> None:
    wanted = params({"choice": ["one two three"]}, stop=[" two"], logprobs=2)
    (output,) = llm.generate([PROMPT], wanted, use_tqdm=False)
    choice = output.outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("one", "stop", " two")
    assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)


def test_each_choice_follows_the_grammar_by_itself(llm: LLM) -> None:
    said = say(llm, params({"regex": "[a-z]{6}"}, n=4))
    assert len(said) == 4
    assert len(set(said)) > 1
    assert all(re.fullmatch("[a-z]{6}", text) for text, _ in said)


@pytest.mark.parametrize(
    "change", [{"async_scheduling": False}, {"num_gpu_blocks_override": 8, "max_model_len": 96}]
)
def test_overlap_and_preemption_change_no_token(
    llm: LLM, random_dir: str, change: dict[str, Any]
) -> None:
    wanted = [params({"regex": "[a-z ]{70}"}, seed=n, max_tokens=70) for n in range(4)]
    other = load(random_dir, **change)
    assert say(other, *wanted) == say(llm, *wanted)
    assert other.engine.scheduler.preemptions > 0 or "async_scheduling" in change
    assert other.engine.stats().free_pages == other.engine.stats().num_pages


def test_a_grammar_that_explodes_later_ends_its_request_and_no_other(llm: LLM) -> None:
    free = params(max_tokens=200, ignore_eos=True)
    alone = llm.generate([PROMPT], free, use_tqdm=False)[0].outputs[0].token_ids
    requests = [
        request(llm, "bad", {"regex": "(.{0,200}a){50}"}, max_tokens=900),
        request(llm, "free", max_tokens=200, ignore_eos=True),
    ]
    deltas = collect(llm.engine, requests)
    bad = [delta for delta in deltas if delta.id == "bad"]
    assert bad[-1].finish_reason == "error"
    assert "structured output" in (bad[-1].error or "")
    assert tokens_of(deltas, "free") == alone


def test_a_panic_ends_its_request_and_no_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def advance(self: Matcher, token_ids: Any) -> None:
        if self.grammar == bad.grammar:
            raise Panic("in native code")
        real(self, token_ids)

    real: Callable[..., None] = Matcher.accept_tokens
    bad, good = request(llm, "bad", {"regex": "[b]{9}"}), request(llm, "good", {"regex": "[g]{9}"})
    monkeypatch.setattr(Matcher, "accept_tokens", advance)
    deltas = collect(llm.engine, [bad, good])
    assert Outcome.of(deltas, "bad").finish_reason == "error"
    assert Outcome.of(deltas, "good").finish_reason == "stop"


def test_a_request_may_be_aborted_while_its_grammar_is_built_and_while_it_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, never = llm.engine, Future[Matcher]()
    with monkeypatch.context() as patch:
        patch.setattr(engine.grammars.matchers, "start_matcher", lambda grammar: never)
        engine.add(request(llm, "waits", {"regex": "[a-z]{99}"}))
    assert engine.has_work
    assert engine.stats().waiting == engine.stats().deferred == 1
    engine.add(request(llm, "runs", {"regex": "[a-z]{99}"}))
    deltas = []
    while not tokens_of(deltas, "runs"):
        deltas += engine.step()
    engine.abort("waits")
    engine.abort("runs")
    deltas += collect(engine, [])
    assert [Outcome.of(deltas, id).finish_reason for id in ("waits", "runs")] == ["abort", "abort"]
    assert never.cancelled()
    assert engine.stats().free_pages == engine.stats().num_pages
    assert not engine.has_work


def test_a_grammar_that_the_engine_cannot_build_ends_its_request(llm: LLM) -> None:
    bad = GenerateRequest(
        id="bad", prompt=Prompt(PROMPT), params=params(), grammar="start: nonsense"
    )
    deltas = collect(llm.engine, [bad, request(llm, "good", {"regex": "ok"})])
    assert Outcome.of(deltas, "bad").finish_reason == "error"
    assert Outcome.of(deltas, "good").finish_reason == "stop"


def test_a_step_that_fails_takes_the_grammars_with_it_and_the_engine_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm.engine
    engine.add(request(llm, "r", {"regex": "[a-z]{9}"}))
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "plan", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            collect(engine, [])
    assert not engine.has_work
    assert say(llm, params({"regex": "ok"})) == [("ok", "stop")]


@pytest.mark.parametrize(
    "structure", [{"regex": "["}, {"json": {"type": "foo"}}, {"grammar": "start: foo"}]
)
def test_what_does_not_compile_is_refused_by_the_library(
    llm: LLM, structure: dict[str, Any]
) -> None:
    with pytest.raises(OptionError, match="structured_outputs") as error:
        say(llm, params(structure))
    assert error.value.param == "structured_outputs"
    assert not llm.engine.has_work


def test_the_engine_takes_grammars_that_were_compiled_only(
    llm: LLM, make_engine: Callable[..., Engine]
) -> None:
    with pytest.raises(RequestError, match="compiled"):
        llm.engine.add(
            GenerateRequest(id="r", prompt=Prompt(PROMPT), params=params({"regex": "a"}))
        )
    with pytest.raises(RequestError, match="tokenizer") as error:
        make_engine().add(
            GenerateRequest(
                id="r", prompt=Prompt([1]), params=SamplingParams(), grammar='start: "a"'
            )
        )
    assert error.value.param == "structured_outputs"
