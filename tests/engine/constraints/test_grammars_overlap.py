"""Masks are found beside other work of the host: in which order, that it changes no token, and what
a guided row costs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest

from jaxllm import LLM
from jaxllm.engine.output.detok import Detokenizer
from jaxllm.engine.runtime.runner import Forwarded
from jaxllm.engine.scheduling.plan import Plan
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from tests.engine.conftest import Outcome, collect, write_random
from tests.engine.constraints.test_grammars import PROMPT, compact, load, params, request, say
from tests.engine.test_host_work import STEPS, counted


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> LLM:
    return load(write_random(tmp_path_factory.mktemp("random"), repo))


def test_tokens_told_and_masks_found_together_are_those_of_one_by_one(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("lamp", "point", "exam")
    wanted = [params(compact(name), max_tokens=80, seed=n) for n, name in enumerate(names)] + [
        params({"regex": "[a-z]{40}"}, min_tokens=9)
    ]
    parallel = llm.engine.grammars.parallel
    assert parallel is not None
    monkeypatch.setattr("jaxllm.engine.constraints.grammars.SEQUENTIAL", 10**9)
    said = say(llm, *wanted)
    monkeypatch.setattr("jaxllm.engine.constraints.grammars.SEQUENTIAL", 1)
    assert say(llm, *wanted) == said
    with monkeypatch.context() as patch:
        patch.setattr(parallel, "wait_masks", lambda: 1 / 0)
        assert say(llm, *wanted) == said, "what fails together is asked for one by one"
    with monkeypatch.context() as patch:
        patch.setattr(parallel, "accept_each", lambda matchers, tokens: 1 / 0)
        outputs = llm.generate(
            [PROMPT] * 2, [wanted[0], params(max_tokens=9, ignore_eos=True)], use_tqdm=False
        )
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert "structured output" in (outputs[0].outputs[0].error or "")
    assert say(llm, *wanted) == said


def test_texts_are_made_while_masks_are_found_and_before_they_are_waited_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, events = llm.engine, list[str]()

    def note(owner: Any, name: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (events.append(name), real(*args))[1])

    for n in range(3):
        engine.add(request(llm, str(n), {"regex": "[a-z]{99}"}, max_tokens=20, seed=n))
    while engine.stats().running < 3:
        engine.step()
    engine.step()
    for owner, name in (
        (engine.runner, "forward"),
        (engine.grammars.parallel, "start_masks"),
        (Detokenizer, "feed"),
    ):
        note(owner, name)
    for owner, name in (
        (engine.grammars.parallel, "wait_masks"),
        (engine.runner, "apply_token_bitmask"),
        (engine.runner, "draw"),
    ):
        note(owner, name)
    for _ in range(3):
        engine.step()
    collect(engine, [])
    assert (
        events[: 3 * 8]
        == ["forward", "start_masks", *["feed"] * 3, "wait_masks", "apply_token_bitmask", "draw"]
        * 3
    )


def test_a_matcher_is_given_back_only_when_nobody_looks_at_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop string is found while the masks of the next step are; here they take until somebody
    waits for them."""
    grammars, waited, looking, ended = llm.engine.grammars, Event(), Event(), list[bool]()
    parallel, matchers = grammars.parallel, grammars.matchers
    assert parallel is not None and matchers is not None

    def compute(entered: Lock) -> None:
        looking.set()
        real_compute(entered)
        assert waited.wait(60)
        looking.clear()

    def begin(found: Any) -> None:
        waited.clear()
        real_begin(found)

    real_compute, real_begin, real_settle, real_masks, real_back = (
        parallel._compute,
        parallel.start_masks,
        parallel.settle,
        parallel.wait_masks,
        matchers.recycle,
    )
    monkeypatch.setattr("jaxllm.engine.steps.constrained.MIN_JUMP", 10**9)
    monkeypatch.setattr(parallel, "_compute", compute)
    monkeypatch.setattr(parallel, "settle", lambda: (waited.set(), real_settle())[1])
    monkeypatch.setattr(parallel, "wait_masks", lambda: (waited.set(), real_masks())[1])
    monkeypatch.setattr(parallel, "start_masks", begin)
    monkeypatch.setattr(
        matchers,
        "recycle",
        lambda matcher: (ended.append(looking.is_set()), real_back(matcher))[1],
    )
    stopped, whole = (
        params({"choice": ["one two three"]}, stop=[" two"]),
        params({"regex": "[a-z]{30}"}),
    )
    assert [reason for _, reason in say(llm, stopped, whole, whole)] == ["stop"] * 3
    assert ended == [False] * 3


def test_a_guided_row_takes_few_calls(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.engine.constraints.grammars.SEQUENTIAL", 1)

    given = request(llm, "", {"regex": "[a-z]{99}"}, max_tokens=30, ignore_eos=True)

    def calls_of(rows: int) -> Counter[str]:
        for n in range(rows):
            llm.engine.add(
                GenerateRequest(
                    id=str(n),
                    prompt=Prompt([n + 40, 50]),
                    params=given.params,
                    grammar=given.grammar,
                )
            )
        while llm.engine.stats().running < rows:
            llm.engine.step()
        for _ in range(4):
            llm.engine.step()
        with counted() as calls:
            deltas = [delta for _ in range(STEPS) for delta in llm.engine.step()]
        assert len(deltas) == rows * STEPS
        collect(llm.engine, [])
        return calls

    # Now matchers are there, and all rows start with the same step: no page is opened or completed
    # meanwhile
    calls_of(4)
    few, many = calls_of(2), calls_of(4)
    per_row = {
        name: (many[name] - few[name]) / (2 * STEPS) for name in many if many[name] != few[name]
    }
    assert sum(per_row.values()) <= 13, f"calls per row and step: {per_row}"


def slow_grammar(rules: int) -> dict[str, Any]:
    """Quick to compile and to try out, and a tenth of a second for the tokens that may come
    next."""
    names = " | ".join(f"a{i}" for i in range(rules))
    each = "\n".join(f"a{i}: s a{(i + 1) % rules} | /[a-z]/ s" for i in range(rules))
    return {"grammar": f'start: "!" | "~" s\ns: {names}\n{each}'}


def test_a_grammar_that_keeps_everybody_waiting_at_each_token_ends_alone(llm: LLM) -> None:
    wanted = compact("point")
    calm = say(llm, params(wanted), params(max_tokens=40, ignore_eos=True))
    hostile = params(slow_grammar(110), bad_words=["!"], max_tokens=60)
    outputs = llm.generate(
        [PROMPT] * 3,
        [params(wanted), hostile, params(max_tokens=40, ignore_eos=True)],
        use_tqdm=False,
    )
    assert [
        (o.outputs[0].text, o.outputs[0].finish_reason) for o in (outputs[0], outputs[2])
    ] == calm
    ended = outputs[1].outputs[0]
    assert ended.finish_reason == "error" and ended.error is not None
    assert "takes too long" in ended.error and "simplify the grammar" in ended.error
    assert len(ended.token_ids) < 10


def test_grammars_are_told_their_tokens_while_the_next_forward_is_launched(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, told, launch = llm.engine, Event(), llm.engine.runner.forward
    launched = list[bool]()

    def forward(plan: Plan) -> Forwarded:
        launched.append(not plan.processed_requests or plan.chunks != () or told.wait(20))
        return launch(plan)

    def follow(*step: Any) -> None:
        real(*step)
        told.set()

    real = engine.grammars.accept_step
    engine.add(request(llm, "r", {"regex": "[a-z]{99}"}, max_tokens=8))
    while engine.stats().running < 1:
        engine.step()
    monkeypatch.setattr(engine.runner, "forward", forward)
    monkeypatch.setattr(engine.grammars, "accept_step", follow)
    assert Outcome.of(collect(engine, []), "r").finish_reason == "length"
    assert len(launched) >= 7 and all(launched)


@pytest.mark.parametrize(
    ("part", "method"), [("runner", "forward"), ("runner", "collect"), ("grammars", "start_masks")]
)
def test_what_fails_beside_a_forward_is_told_once_that_has_ended(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, part: str, method: str
) -> None:
    engine, running, launch, failed = llm.engine, list[Plan](), llm.engine.runner.forward, Event()

    def forward(plan: Plan) -> Forwarded:
        running.append(plan)
        assert failed.wait(20)
        found = launch(plan)
        running.remove(plan)
        return found

    def fail(*args: Any) -> Any:
        failed.set()
        raise MemoryError

    def start_over() -> None:
        assert not running, "buffers go while they are used"
        real()

    real = engine.loop.start_over
    engine.add(request(llm, "r", {"regex": "[a-z]{99}"}, max_tokens=8))
    while not engine.loop.in_flight:
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", forward)
        patch.setattr(engine.loop, "start_over", start_over)
        patch.setattr(getattr(engine, part), method, fail)
        with pytest.raises(MemoryError):
            collect(engine, [])
    assert not engine.has_work
    assert say(llm, params({"regex": "ok"})) == [("ok", "stop")]


def test_who_interrupts_the_wait_for_a_forward_finds_an_engine_that_nobody_uses(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, launch, interrupted, resets = llm.engine, llm.engine.runner.forward, Event(), Event()
    meanwhile = list[bool]()

    def forward(plan: Plan) -> Forwarded:
        assert interrupted.wait(20)
        meanwhile.append(resets.wait(0.3))
        return launch(plan)

    def interrupt(futures: Any) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def reset() -> None:
        resets.set()
        real()

    real = engine.runner.reset
    engine.add(request(llm, "r", {"regex": "[a-z]{99}"}, max_tokens=8))
    while not engine.loop.in_flight:
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", forward)
        patch.setattr(engine.runner, "reset", reset)
        patch.setattr("jaxllm.engine.steps.constrained.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            collect(engine, [])
    assert meanwhile == [False] and resets.is_set() and not engine.has_work
    assert say(llm, params({"regex": "ok"})) == [("ok", "stop")]
