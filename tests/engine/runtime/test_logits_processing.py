"""Options that `process` serves, through the whole engine: tokens equal the dense model's with the
definitions applied to its logits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import models, weights
from jaxllm.engine.engine import Engine
from jaxllm.engine.scheduling.request import LogitsOptions
from jaxllm.mesh import make_mesh
from jaxllm.messages import GenerateRequest, RequestError
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.prompt import Prompt
from jaxllm.sampling.bits import packed, remove
from jaxllm.sampling.constraint import ConstraintError
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import TINY, collect, outcomes, reading_words, run, tokens_of
from tests.engine.fake_host import Optimist
from tests.sampling.process_oracle import expected

MakeEngine = Callable[..., Engine]
Dense = Callable[[Sequence[int]], np.ndarray]
V = TINY["vocab_size"]
FREE: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 0.9},
    {"presence_penalty": 1.3, "frequency_penalty": -0.2},
    {"logit_bias": {"5": 2.5, 6: -100, 7: 1.0}},
    {"allowed_token_ids": [1, 2, 3, 50, 103]},
    {
        "allowed_token_ids": list(range(0, V, 2)),
        "presence_penalty": 0.7,
        "repetition_penalty": 1.2,
        "logit_bias": {8: 1.5},
    },
    {},
)


@pytest.fixture(scope="module")
def dense(tiny_dir: str) -> Dense:
    """The logits after a text, by plain attention."""
    spec, mesh = models.read_spec(tiny_dir), make_mesh(1)
    graphdef, state = weights.load(tiny_dir, weights.outline(spec, mesh, jnp.float32), "dummy")

    @jax.jit
    def last(state: nnx.State, token_T: jax.Array, length: jax.Array) -> jax.Array:
        module = nnx.merge(graphdef, state)
        context = DenseContext()
        hidden_TD = module(token_T, jnp.arange(token_T.shape[0]), context)
        return module.logits(hidden_TD[length - 1][None], context)[0]

    return lambda tokens: np.asarray(
        last(state, jnp.array([*tokens, *[0] * (96 - len(tokens))]), jnp.array(len(tokens)))
    )


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine) -> Engine:
    """Few pages and slots, so that requests are preempted and slots change hands; overlapped."""
    engine = reading_words(make_engine(num_gpu_blocks_override=20))
    engine.scheduler.estimator = Optimist()
    return engine


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(96) for _ in range(rng.randrange(3, 30))] for _ in range(count)]


def greedy(
    dense: Dense,
    prompt: list[int],
    params: SamplingParams,
    forbid: Callable[[list[int]], list[int]] = lambda _: [],
) -> list[int]:
    """What the definitions say."""
    output: list[int] = []
    while len(output) < (params.max_tokens or 0):
        logits = expected(dense([*prompt, *output]), params, prompt, output)
        logits[forbid(output)] = -np.inf
        output.append(int(logits.argmax()))
    return output


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_follow_the_definitions_in_a_crowd_of_all_kinds(
    engine: Engine, dense: Dense, depth: int
) -> None:
    engine.runner.depth = depth
    params = [SamplingParams(**FREE, **options) for options in ASKED]
    prompts = prompts_of(len(ASKED))
    before = engine.stats().preemptions
    found = run(engine, prompts, params)
    assert engine.stats().preemptions > before
    for prompt, some, tokens in zip(prompts, params, found, strict=True):
        assert tokens == greedy(dense, prompt, some)
    engine.runner.depth = 1


def test_bad_words_are_never_said_and_the_rest_is_as_ever(engine: Engine, dense: Dense) -> None:
    prompts = prompts_of(6, seed=1)
    free = run(engine, prompts, SamplingParams(**FREE))
    words = [[f"{t[0]} {t[1]}", f"{t[6]}", f"{t[9]} {t[10]} {t[11]}"] for t in free]
    params = [
        SamplingParams(**FREE, bad_words=some) if i % 3 else SamplingParams(**FREE)
        for i, some in enumerate(words)
    ]
    found = run(engine, prompts, params)
    for i, (prompt, some) in enumerate(zip(prompts, words, strict=True)):
        bad = [[int(t) for t in word.split()] for word in some] if i % 3 else []

        def forbidden(output: list[int], bad: list[list[int]] = bad) -> list[int]:
            return [
                word[-1] for word in bad if len(word) == 1 or output[-len(word) + 1 :] == word[:-1]
            ]

        assert found[i] == greedy(dense, prompt, params[i], forbidden)
        assert (found[i] == free[i]) == (i % 3 == 0)


def test_a_step_of_those_who_ask_for_nothing_runs_and_uploads_nothing_more(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pack_slot", "pack_bitmask"):
        monkeypatch.setattr(f"jaxllm.engine.runtime.runner.{name}", None)
    run(engine, prompts_of(3), SamplingParams(**FREE))


class Failing:
    """Allows everything until so many tokens were said, then fails, or allows nothing."""

    def __init__(self, after: int, where: str):
        self.left, self.where = after, where

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        self.left -= len(token_ids)
        if self.left <= 0 and self.where == "advance":
            raise ConstraintError("the grammar is at its end")

    def apply_mask(self, allowed_W: np.ndarray) -> None:
        if self.left <= 0 and self.where == "mask":
            raise KeyError("/secret")
        if self.left <= 0:
            allowed_W[:] = 0


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("advance", "the grammar is at its end"),
        ("mask", "a constraint failed"),
        ("nothing", "allow no token here"),
    ],
)
def test_a_constraint_that_fails_ends_its_own_request_only(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = prompts_of(3, seed=2)
    free = run(engine, prompts, SamplingParams(**FREE))
    of = engine._options.read_options
    failing = lambda params, thinking: (
        LogitsOptions(packed(range(V), V), (Failing(5, where),))
        if params.seed == 1
        else of(params, thinking)
    )
    monkeypatch.setattr(engine._options, "read_options", failing)
    params = [
        SamplingParams(**FREE),
        SamplingParams(**FREE, seed=1),
        SamplingParams(**FREE, presence_penalty=0.001),
    ]
    deltas = collect(
        engine,
        [
            GenerateRequest(id=str(i), prompt=Prompt(p), params=s)
            for i, (p, s) in enumerate(zip(prompts, params, strict=True))
        ],
    )
    failed = [d for d in deltas if d.id == "1"][-1]
    assert (
        failed.finish_reason == "error"
        and failed.error is not None
        and says in failed.error
        and "secret" not in failed.error
    )
    assert failed.error_param == (
        "allowed_token_ids"
        if where == "nothing"
        else None
        if where == "mask"
        else "structured_outputs"
    )
    assert tokens_of(deltas, "1") == free[1][:5]
    assert [tokens_of(deltas, "0"), tokens_of(deltas, "2")] == [free[0], free[2]]
    assert engine.stats().free_pages == engine.stats().num_pages


def test_logits_that_all_are_impossible_end_their_request_only(engine: Engine) -> None:
    options = {
        "allowed_token_ids": [5, *engine.resolved.eos_ids],
        "bad_words": ["5 5"],
        "min_tokens": 3,
    }  # only the end after a 5, and it is held back
    params = [SamplingParams(**FREE | {"ignore_eos": False} | options), SamplingParams(**FREE)]
    found = outcomes(engine, prompts_of(2), params)
    assert [o.finish_reason for o in found] == ["error", "length"]
    assert found[0].tokens == [5]


def test_a_failed_step_leaves_a_working_process(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, params = prompts_of(1)[0], SamplingParams(**FREE, presence_penalty=1)
    before = run(engine, [prompt], params)
    engine.add(GenerateRequest(id="lost", prompt=Prompt(prompt), params=params))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "collect", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            collect(engine, [])
    assert run(engine, [prompt], params) == before


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"logit_bias": {V: 1}}, "logit_bias"),
        ({"allowed_token_ids": [1, V]}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["5", "6"], "allowed_token_ids": [5, 6]}, "bad_words"),
        ({"min_tokens": 3, "allowed_token_ids": [96]}, "allowed_token_ids"),
        (
            {"min_tokens": 3, "allowed_token_ids": [5, 96], "stop_token_ids": [5]},
            "allowed_token_ids",
        ),
        (
            {"min_tokens": 3, "allowed_token_ids": [5], "stop_token_ids": [5], "ignore_eos": True},
            "allowed_token_ids",
        ),
        ({"min_tokens": 3, "allowed_token_ids": [5, 96], "bad_words": ["5"]}, "allowed_token_ids"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_is_refused_by_name(
    engine: Engine, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        engine.add(GenerateRequest(id="x", prompt=Prompt([1]), params=SamplingParams(**options)))
    assert refused.value.param == param
    assert not engine.has_work


@pytest.mark.parametrize(
    "options",
    [{"ignore_eos": True, "min_tokens": 3}, {"min_tokens": 0}, {"min_tokens": 3, "temperature": 1}],
)
def test_allowing_only_tokens_that_may_come_is_no_fault(
    engine: Engine, options: dict[str, Any]
) -> None:
    allowed = [5, 96] if "temperature" in options else [96]
    engine.validate(
        GenerateRequest(
            id="x",
            prompt=Prompt([1]),
            params=SamplingParams(**options, allowed_token_ids=allowed),
        )
    )


def test_a_mask_changes_between_tokens(
    engine: Engine, dense: Dense, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting:
        """Token n of the output is n modulo 7."""

        said = 0

        def accept_tokens(self, token_ids: Sequence[int]) -> None:
            self.said += len(token_ids)

        def apply_mask(self, allowed_W: np.ndarray) -> None:
            for token in range(V):
                if token != self.said % 7:
                    remove(allowed_W, token)

    monkeypatch.setattr(
        engine._options,
        "read_options",
        lambda params, thinking: (
            LogitsOptions(packed(range(V), V), (Counting(),)) if params.seed == 1 else None
        ),
    )
    params = [
        SamplingParams(**FREE | {"temperature": 1.0}, seed=1, n=2),
        SamplingParams(**FREE),
        SamplingParams(**FREE, seed=1),
    ]
    prompts = prompts_of(3, seed=3)
    found = run(engine, prompts, params)
    assert found[0] == found[2] == [i % 7 for i in range(24)]
    assert found[1] == greedy(dense, prompts[1], params[1])
