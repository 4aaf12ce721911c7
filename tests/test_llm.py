"""Offline use with the built-in model: prompts in every form, order, chat, options, errors."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from jaxllm import LLM, BeamSearchParams, OptionError, RequestOutput, SamplingParams
from jaxllm.chat_template import TemplateError
from jaxllm.engine.scheduling.plan import Plan
from jaxllm.messages import RequestError
from tests.engine.few_shapes import few_shapes

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    with few_shapes():
        return LLM(
            "demo", max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64, enforce_eager=True
        )


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_the_demo_model_adds(llm: LLM) -> None:
    sums = [(23, 45), (61, 17), (38, 44), (90, 9), (57, 68), (12, 83)]
    outputs = llm.chat([ask(f"What is {a} + {b}?") for a, b in sums], GREEDY, use_tqdm=False)
    right = [
        str(a + b) in output.outputs[0].text for (a, b), output in zip(sums, outputs, strict=True)
    ]
    assert sum(right) >= 5
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)


def test_text_ids_and_dicts_are_the_same_prompt(llm: LLM) -> None:
    text = "12 + 34 ="
    ids = llm.get_tokenizer().encode(text)
    outputs = llm.generate(
        [text, ids, {"prompt": text}, {"prompt_token_ids": ids}], GREEDY, use_tqdm=False
    )
    assert len(set(texts(outputs))) == 1
    assert [output.prompt_token_ids for output in outputs] == [ids] * 4
    assert outputs[0].prompt == text
    assert texts(llm.generate(ids, GREEDY, use_tqdm=False)) == texts(outputs[:1])


def test_a_request_that_fails_takes_no_other_with_it_and_says_why(
    llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(said: list[int], logits: object) -> object:
        if len(said) == 3:
            raise ValueError("no fourth token")
        return logits

    fails = replace(GREEDY, logits_processors=[broken], ignore_eos=True)
    prompts = ["1 + 1 =", "2 + 2 =", "3 + 3 =", "4 + 4 ="]
    alone = texts(llm.generate(prompts, GREEDY, use_tqdm=False))
    outputs = llm.generate(
        prompts, [GREEDY, fails, GREEDY, replace(fails, temperature=1, n=2, seed=1)], use_tqdm=False
    )
    assert (texts(outputs)[0], texts(outputs)[2]) == (alone[0], alone[2])
    assert [
        [choice.finish_reason == "error" for choice in output.outputs] for output in outputs
    ] == [
        [False],
        [True],
        [False],
        [True, True],
    ]
    for choice in outputs[1].outputs + outputs[3].outputs:
        assert "no fourth token" in (choice.error or "") and len(choice.token_ids) == 3
    assert all(output.finished for output in outputs) and outputs[0].outputs[0].error is None
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "3 choices failed" in said.getMessage() and "no fourth token" in said.getMessage()


def test_results_keep_the_order_of_the_prompts(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 12, 2, 7)
    ]
    outputs = llm.generate([f"{i} + 1 =" for i in range(6)], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 5, 12, 2, 7]
    assert [output.prompt for output in outputs] == [f"{i} + 1 =" for i in range(6)]


def test_the_first_step_runs_while_later_prompts_come(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    enter, step = llm.engine.enter, llm.engine.step
    monkeypatch.setattr(
        llm.engine, "enter", lambda request: (order.append("enter"), enter(request))[1]
    )
    monkeypatch.setattr(llm.engine, "step", lambda: (order.append("step"), step())[1])
    found = llm.generate(
        [[5] * 30] * 6, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), use_tqdm=False
    )
    assert [len(output.outputs[0].token_ids) for output in found] == [2] * 6
    assert order[:8] == ["enter"] * 3 + ["step"] + ["enter"] * 3 + ["step"], (
        "a step's worth is 64 tokens"
    )


def test_the_first_step_is_full_of_tokens_that_are_not_cached(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = (
        [[first, *[7] * 39] for first in range(5, 11)],
        SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
    )
    llm.generate(prompts, params, use_tqdm=False)
    order: list[str] = []
    enter, step = llm.engine.enter, llm.engine.step
    monkeypatch.setattr(
        llm.engine, "enter", lambda request: (order.append("enter"), enter(request))[1]
    )
    monkeypatch.setattr(llm.engine, "step", lambda: (order.append("step"), step())[1])
    llm.generate(prompts, params, use_tqdm=False)
    assert order[:7] == ["enter"] * 6 + ["step"], (
        "of each 8 tokens are left, and a step's worth is 64"
    )


def test_priorities_decide_about_the_first_step_too() -> None:
    with few_shapes():
        llm = LLM(
            "demo",
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            enforce_eager=True,
            scheduling_policy="priority",
        )
    first: list[list[int]] = []
    plan = llm.engine.scheduler.plan

    def planned() -> Plan:
        found = plan()
        first.append([chunk.request.params.priority for chunk in found.chunks])
        return found

    llm.engine.scheduler.plan = planned  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate([[5] * 40] * 6, params, use_tqdm=False, priority=[100] * 4 + [-100] * 2)
    assert first[0][:2] == [-100, -100]


def test_n_choices_with_logprobs_and_a_stop_string(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=2, temperature=1.0, max_tokens=8, logprobs=2, ignore_eos=True)
    (output,) = llm.generate("sort: 3 1 2", params, use_tqdm=False)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    for choice in output.outputs:
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids) == 8
        chosen = [
            position[token].logprob
            for position, token in zip(choice.logprobs, choice.token_ids, strict=True)
        ]
        assert choice.cumulative_logprob == pytest.approx(sum(chosen))
        assert all(2 <= len(position) <= 3 for position in choice.logprobs)
    whole = (
        llm.generate(
            "1 + 1 =", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False
        )[0]
        .outputs[0]
        .text
    )
    stop = whole[3:5]
    (stopped,) = llm.generate(
        "1 + 1 =",
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=stop),
        use_tqdm=False,
    )
    assert stopped.outputs[0].text == whole[: whole.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)


def test_the_stop_string_and_the_stop_tokens_text_can_be_part_of_the_text(llm: LLM) -> None:
    def run(**options: object) -> tuple[str, str | None, list[int]]:
        params = SamplingParams(
            temperature=0,
            max_tokens=24,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            **options,
        )
        choice = llm.chat(ask("What is 23 + 45?"), params, use_tqdm=False)[0].outputs[0]
        return choice.text, choice.finish_reason, choice.token_ids

    text, reason, ids = run()
    assert reason == "stop"
    assert text == llm.get_tokenizer().decode(ids)  # the end-of-turn token too
    stop = text[2:4]
    assert run(stop=stop)[0] == text[: text.index(stop) + 2]


def test_a_prompt_is_truncated_to_its_last_tokens_and_runs_as_such(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("12 + 34 = 56 + 1 + 1 =")

    def run(prompt: list[int], **options: int) -> tuple[list[int], list[int]]:
        (output,) = llm.generate(
            [prompt],
            SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **options),
            use_tqdm=False,
        )
        return output.prompt_token_ids, output.outputs[0].token_ids

    assert run(ids, truncate_prompt_tokens=5) == run(ids[-5:])
    assert run(ids, truncate_prompt_tokens=500) == run(ids)
    assert run(ids * 200, truncate_prompt_tokens=-1) == run((ids * 200)[-506:])  # 512 less 6
    with pytest.raises(
        OptionError,
        match=r"truncate_prompt_tokens \(513\) must be at most the model's maximum length of 512",
    ):
        run(ids, truncate_prompt_tokens=513)


def test_log_probabilities_of_a_prompt_are_those_of_generating_it(llm: LLM) -> None:
    prompt = llm.get_tokenizer().encode("12 + 34 =")
    (said,) = llm.generate(
        [prompt],
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2),
        use_tqdm=False,
    )
    choice = said.outputs[0]
    assert choice.logprobs is not None
    assert said.prompt_logprobs is None
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    (read,) = llm.generate([prompt + choice.token_ids], params, use_tqdm=False)
    assert read.prompt_logprobs is not None
    assert read.prompt_logprobs[0] is None
    assert len(read.prompt_logprobs) == len(prompt) + 8
    for mine, theirs, token in zip(
        read.prompt_logprobs[-8:], choice.logprobs, choice.token_ids, strict=True
    ):
        assert mine is not None
        assert next(iter(mine)) == token
        assert mine.keys() == theirs.keys()
        for id, entry in mine.items():
            assert (entry.rank, entry.decoded_token) == (theirs[id].rank, theirs[id].decoded_token)
            assert entry.logprob == pytest.approx(theirs[id].logprob, abs=1e-3)


def test_without_detokenizing_there_are_tokens_and_no_text(llm: LLM) -> None:
    plain, silent = (
        llm.generate(
            "1 + 1 =", SamplingParams(temperature=0, max_tokens=8, detokenize=on), use_tqdm=False
        )[0].outputs[0]
        for on in (True, False)
    )
    assert (silent.text, silent.token_ids) == ("", plain.token_ids)
    with pytest.raises(RequestError, match="stop strings need a tokenizer and detokenize"):
        llm.generate("a", SamplingParams(detokenize=False, stop="x"), use_tqdm=False)


def test_a_bad_prompt_is_refused_before_any_runs_and_the_engine_stays_usable(llm: LLM) -> None:
    before = llm.get_metrics()
    for bad in (
        [1] * 600,
        [-1],
        [10**6],
        {"text": "x"},
        None,
        5,
        b"abc",
        {"prompt": None},
        "\ud800",
        {"prompt_token_ids": "x"},
    ):
        with pytest.raises(RequestError):
            llm.generate(["1 + 1 =", bad], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    for misuse in (None, 5, b"abc"):
        with pytest.raises(RequestError):
            llm.generate(misuse, GREEDY, use_tqdm=False)
    for misuse in ({"temperature": 0}, 5):
        with pytest.raises(RequestError, match="SamplingParams"):
            llm.generate("a", misuse, use_tqdm=False)
    for misuse in ("hi", None, 5):
        with pytest.raises(RequestError, match="list of messages"):
            llm.chat(misuse, GREEDY, use_tqdm=False)
    for content in (5, [{"type": "image_url", "image_url": "x"}], ["text"]):
        with pytest.raises(RequestError, match="message 1 must be text"):
            llm.chat(
                [{"role": "user", "content": "a"}, {"role": "user", "content": content}],
                GREEDY,
                use_tqdm=False,
            )
    for misuse in (None, SamplingParams()):
        with pytest.raises(RequestError, match="BeamSearchParams"):
            llm.beam_search("a", misuse)
    with pytest.raises(FrozenInstanceError):
        GREEDY.n = 0  # type: ignore[misc]
    assert llm.get_metrics() == before
    assert len(llm.generate("1 + 1 =", GREEDY, use_tqdm=False)) == 1


def test_a_chat_can_have_a_template_of_its_own_and_shows_its_prompt(llm: LLM) -> None:
    source = "{{ messages[0]['content'] }} ="
    (own,) = llm.chat(ask("12 + 34"), GREEDY, chat_template=source, use_tqdm=False)
    assert own.prompt == "12 + 34 ="
    assert texts([own]) == texts(llm.generate("12 + 34 =", GREEDY, use_tqdm=False))
    grounded = "{{ documents[0].text }}, {{ messages[0]['content'] }} ="
    given = {"documents": [{"text": "add"}]}
    (own,) = llm.chat(
        ask("12 + 34"), GREEDY, chat_template=grounded, chat_template_kwargs=given, use_tqdm=False
    )
    assert own.prompt == "add, 12 + 34 ="
    with pytest.raises(TemplateError, match="reads no documents"):
        llm.chat(ask("12 + 34"), GREEDY, chat_template_kwargs=given, use_tqdm=False)
    (usual,) = llm.chat(ask("12 + 34"), GREEDY, use_tqdm=False)
    assert usual.prompt is not None
    assert usual.prompt.startswith("<|im_start|>")
    assert usual.prompt_token_ids == llm.get_tokenizer().encode(usual.prompt)


def test_priorities_are_one_for_each_prompt_and_need_their_policy(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    assert len(llm.generate(["a", "b"], params, use_tqdm=False, priority=[0, 0])) == 2
    with pytest.raises(RequestError, match="2 prompts but 1 priorities"):
        llm.generate(["a", "b"], params, use_tqdm=False, priority=[1])
    with pytest.raises(RequestError, match="scheduling-policy"):
        llm.generate(["a", "b"], params, use_tqdm=False, priority=[1, 2])


def test_best_of_returns_the_likeliest_choices_with_their_text(llm: LLM) -> None:
    options: dict = {"seed": 2, "temperature": 1.2, "max_tokens": 6, "ignore_eos": True}
    (every,) = llm.generate(
        "sort: 3 1 2", SamplingParams(n=4, logprobs=0, **options), use_tqdm=False
    )
    (best,) = llm.generate("sort: 3 1 2", SamplingParams(n=2, best_of=4, **options), use_tqdm=False)
    order = sorted(every.outputs, key=lambda choice: -(choice.cumulative_logprob or 0))
    assert [(c.index, c.text, c.logprobs) for c in best.outputs] == [
        (i, c.text, None) for i, c in enumerate(order[:2])
    ]
    assert [c.cumulative_logprob for c in best.outputs] == pytest.approx(
        [c.cumulative_logprob for c in order[:2]], abs=1e-4
    )


def test_a_beam_search_returns_whole_sequences_best_first(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    first, second = llm.beam_search(["sort: 3 1 2", {"prompt": "1 + 1 ="}], params)
    options: dict = {"use_beam_search": True, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    (same,) = llm.generate("sort: 3 1 2", SamplingParams(n=3, **options), use_tqdm=False)
    prompt = same.prompt_token_ids
    assert [beam.tokens for beam in first.sequences] == [
        prompt + choice.token_ids for choice in same.outputs
    ]
    assert [beam.text for beam in first.sequences] == [
        "sort: 3 1 2" + choice.text for choice in same.outputs
    ]
    for beam in first.sequences + second.sequences:
        chosen = [
            position[token].logprob
            for position, token in zip(beam.logprobs, beam.tokens[-8:], strict=True)
        ]
        assert beam.cum_logprob == pytest.approx(sum(chosen), abs=1e-4)
        assert beam.finish_reason == "length"
    sums = [beam.cum_logprob for beam in first.sequences]
    assert sums == sorted(sums, reverse=True) and len(second.sequences) == 3
    greedy = llm.generate(
        "1 + 1 =",
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0),
        use_tqdm=False,
    )[0].outputs[0]
    assert second.sequences[0].cum_logprob >= (greedy.cumulative_logprob or 0) - 1e-4


def test_a_beam_search_that_cannot_be_is_refused_by_the_name_of_its_argument(llm: LLM) -> None:
    with pytest.raises(OptionError, match="beam_width must be in") as error:
        llm.beam_search("a", BeamSearchParams(beam_width=0, max_tokens=8))
    assert error.value.param == "beam_width"
    with pytest.raises(OptionError, match="temperature must be 0 or 1"):
        llm.beam_search("a", BeamSearchParams(beam_width=2, max_tokens=8, temperature=0.5))
