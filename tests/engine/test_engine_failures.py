"""What an engine refuses, what fails, and what is left afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.engine.engine import Engine
from jaxllm.messages import GenerateRequest, RequestError
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.by_layer import by_layer, spoiled
from tests.engine.conftest import collect, run, tokens_of
from tests.engine.test_engine import PROMPT, MakeEngine, request


@pytest.mark.parametrize(
    ("prompt", "params", "param", "says"),
    [
        ([], {}, "prompt", "empty"),
        ([1] * 128, {}, "prompt", "128"),
        ([-1], {}, "prompt", "-1"),
        ([104], {}, "prompt", "104"),
        ([1.5], {}, "prompt", "integers"),
        ([True], {}, "prompt", "integers"),
        ([1, 2.0, 3], {}, "prompt", "integers"),
        ([1], {"stop_token_ids": [104]}, "stop_token_ids", "104"),
        ([1], {"logprobs": 21}, "logprobs", "20"),
        ([1], {"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ([1], {"stop": "x"}, "stop", "tokenizer"),
    ],
)
def test_what_cannot_run_is_refused_by_name_and_changes_nothing(
    engine: Engine, prompt: list, params: dict, param: str, says: str
) -> None:
    before = engine.stats()
    with pytest.raises(RequestError, match=says) as error:
        engine.add(
            GenerateRequest(id="bad", prompt=Prompt(prompt), params=SamplingParams(**params))
        )
    assert error.value.param == param
    assert engine.stats() == before
    assert not engine.has_work


def test_a_full_queue_refuses_the_next_request(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_queued_reqs=2)  # beside the 4 that run
    params = SamplingParams(max_tokens=2)
    for i in range(6):
        engine.add(request(params, f"r{i}"))
    with pytest.raises(RequestError, match="full") as error:
        engine.add(request(params, "c"))
    assert error.value.code == "queue_full"
    collect(engine, [])


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_frees_the_pages_at_once_and_ends_every_choice(engine: Engine, steps: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, n=2)
    engine.add(request(params))
    for _ in range(steps):
        engine.step()
    engine.abort("r")
    assert engine.stats().free_pages == engine.stats().num_pages
    ends = [d for d in collect(engine, []) if d.finish_reason]
    assert sorted((d.index, d.finish_reason) for d in ends) == [(0, "abort"), (1, "abort")]
    engine.abort("r")
    assert not engine.has_work


def test_logits_that_are_not_finite_end_only_their_request(make_engine: MakeEngine) -> None:
    engine = make_engine(enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    alone = run(engine, [PROMPT], params)[0]
    engine.add(request(params, "poisoned", [7] * 9))
    engine.add(request(params, "healthy"))
    deltas = engine.step() + engine.step() + engine.step()
    (victim,) = (r for r in engine.scheduler._running if r.id == "poisoned")
    engine.runner.kv = spoiled(engine.runner.kv, 0, victim.pages[0])
    deltas += collect(engine, [])
    ends = {d.id: d for d in deltas if d.finish_reason}
    assert ends["poisoned"].finish_reason == "error"
    assert "finite" in (ends["poisoned"].error or "")
    assert tokens_of(deltas, "healthy") == alone


def test_nobodys_tokens_are_written_in_no_layer(make_engine: MakeEngine) -> None:
    """Rows and tokens that pad a step, rows that have stopped, and tokens whose keys are there
    already.
    """
    engine = make_engine()
    assert engine.scheduler.kv_manager.pools[0].allocate(1) == [0], (
        "page P of a layer would be page 0 of the next one"
    )
    several = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, n=3)
    collect(
        engine,
        [request(several), request(SamplingParams(temperature=0, max_tokens=9), "s", PROMPT * 5)],
    )
    for pages in by_layer(engine.runner.kv):
        written = np.asarray(pages).any(axis=(2, 3, 4))
        assert (written == written[0]).all() and written.any() and not written[:, 0].any()


def test_a_step_that_fails_leaves_an_empty_engine_and_no_prefix_that_was_never_written(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    prompt, params = PROMPT * 6, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = run(make_engine(), [prompt], params)
    with monkeypatch.context() as broken:
        broken.setattr(
            engine.runner, "forward", lambda plan: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        engine.add(request(params, prompt=prompt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert not engine.has_work
    assert engine.stats().free_pages == engine.stats().num_pages
    engine.scheduler.check()
    (tokens,) = run(engine, [prompt], params)
    assert [tokens] == expected
    assert engine.stats().prefix_hits == 0


def test_the_pages_of_a_request_without_finite_logits_are_not_found_again(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    params, prompt = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), PROMPT * 5
    alone = run(make_engine(), [prompt], params)
    engine.add(request(params, "poisoned", prompt))
    _ = engine.step() + engine.step() + engine.step()
    (victim,) = engine.scheduler._running
    engine.runner.kv = spoiled(engine.runner.kv, 1, victim.pages[1])
    assert collect(engine, [])[-1].finish_reason == "error"
    assert run(engine, [prompt], params) == alone
    assert engine.stats().prefix_hits == 0
    engine.scheduler.check()


def test_a_reset_computes_running_requests_anew_and_forgets_what_they_stand_on(
    make_engine: MakeEngine,
) -> None:
    engine, params = make_engine(), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [PROMPT * 4, PROMPT * 3 + [5]]
    alone = [
        run(make_engine(enable_prefix_caching=False), [prompt], params)[0] for prompt in prompts
    ]
    deltas = []
    for number, prompt in enumerate(prompts):
        engine.add(request(params, f"r{number}", prompt))
    for _ in range(7):
        deltas += engine.step()
    assert engine.reset_prefix_cache(reset_running_requests=True)
    assert len(engine.scheduler.pools[0].index or ()) == 0
    deltas += collect(engine, [])
    assert [tokens_of(deltas, f"r{number}") for number in range(2)] == alone
    assert engine.stats().preemptions == 2
    engine.scheduler.check()


def test_only_an_idle_engine_forgets_its_prefixes(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add(request(params, prompt=PROMPT * 4))
    engine.step()
    assert not engine.reset_prefix_cache()
    collect(engine, [])
    run(engine, [PROMPT * 4], params)
    before = engine.stats()
    assert engine.reset_prefix_cache()
    after = engine.stats()
    assert before.prefix_hits > 0 and before.prefix_queries > before.prefix_hits
    assert (after.prefix_hits, after.prefix_queries) == (
        before.prefix_hits,
        before.prefix_queries,
    ), "counters never fall"
    run(engine, [PROMPT * 4], params)
    assert engine.stats().prefix_hits == before.prefix_hits
