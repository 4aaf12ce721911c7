"""Logits processors of research code: compiled into the engine or called on the host, for the
requests that ask and no others."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.engine.engine import Engine
from jaxllm.messages import GenerateRequest, RequestError
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from jaxllm.sampling.processors import ProcessorState, read_processors
from tests.engine.conftest import TINY, collect, outcomes, reading_words, run
from tests.engine.fake_host import Optimist

MakeEngine = Callable[..., Engine]
V = TINY["vocab_size"]
FREE: dict[str, Any] = {"temperature": 0, "max_tokens": 14, "ignore_eos": True}
PROMPTS = [[5, 6, 7], [8] * 20, [1, 2, 3, 4] * 4, [60]]


def push(
    logits_SV: jax.Array, state: ProcessorState, *, token: float = 0, strength: float = 0.0
) -> jax.Array:
    """Adds to one token's logit."""
    return logits_SV + jnp.where(jnp.arange(V) == token[:, None], strength[:, None], 0)  # type: ignore[index]


def steps(
    logits_SV: jax.Array, state: ProcessorState, *, order: tuple[float, ...] = (1, 2, 3)
) -> jax.Array:
    """Output token n is order[n % 3]; a token that was said 4 times, or is in the prompt, is
    followed by nothing but 50."""
    said = state.position_S - state.prompt_length_S
    wanted = jnp.take_along_axis(order, said[:, None] % 3, axis=1)  # type: ignore[arg-type]
    often = (state.counts_SV >= 4).any(axis=1) | state.prompt_SV[:, 60]
    return jnp.where(jnp.arange(V) == jnp.where(often, 50.0, wanted[:, 0])[:, None], 5.0, -5.0)


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine) -> Engine:
    """Few pages, so that requests are preempted."""
    engine = make_engine(processors=[push, steps], num_gpu_blocks_override=9, max_model_len=64)
    engine.scheduler.estimator = Optimist()
    return engine


def test_requests_that_enable_a_processor_get_it_and_others_do_not(engine: Engine) -> None:
    free = run(engine, PROMPTS, SamplingParams(**FREE))
    params = [
        SamplingParams(**FREE),
        SamplingParams(**FREE, logits_processors=["steps"]),
        SamplingParams(
            **FREE, logits_processors=["push"], extra_args={"token": 9, "strength": 1e4}
        ),
        SamplingParams(**FREE, logits_processors=["steps"], extra_args={"order": [7, 8, 9]}),
    ]
    before = engine.stats().preemptions
    found = run(engine, PROMPTS, params)
    assert engine.stats().preemptions > before
    assert found[0] == free[0]
    assert found[1] == [1, 2, 3] * 3 + [1] + [50] * 4
    assert found[2] == [9] * 14
    assert found[3] == [50] * 14
    assert run(engine, PROMPTS, SamplingParams(**FREE)) == free


def test_processors_run_in_order_after_penalties_and_cannot_undo_a_mask(engine: Engine) -> None:
    params = SamplingParams(
        **FREE,
        logits_processors=["push"],
        extra_args={"token": 9, "strength": 1e4},
        allowed_token_ids=[1, 2],
    )
    assert set(run(engine, [PROMPTS[0]], params)[0]) <= {1, 2}
    both = SamplingParams(
        **FREE, logits_processors=["steps", "push"], extra_args={"token": 9, "strength": 6.0}
    )
    assert run(engine, [PROMPTS[0]], both)[0][:3] == [1, 2, 3], (
        "steps, second in the engine's list, has the last word"
    )


def test_a_default_argument_is_what_the_function_says(engine: Engine) -> None:
    assert run(engine, [PROMPTS[0]], SamplingParams(**FREE, logits_processors=["push"])) == run(
        engine, [PROMPTS[0]], SamplingParams(**FREE)
    )


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"logits_processors": ["pusher"]}, "logits_processors", "this engine has push, steps"),
        (
            {"logits_processors": ["push"], "extra_args": {"order": 1}},
            "extra_args",
            "no processor of this request takes",
        ),
        ({"extra_args": {"token": 1}}, "extra_args", "no processor of this request takes"),
        (
            {"logits_processors": ["steps"], "extra_args": {"order": [1, 2]}},
            "extra_args",
            "must be 3 numbers, got 2",
        ),
        (
            {"logits_processors": ["push"], "extra_args": {"token": [1, 2]}},
            "extra_args",
            "must be 1 numbers, got 2",
        ),
    ],
    ids=str,
)
def test_what_no_processor_takes_is_refused_by_name(
    engine: Engine, options: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        engine.add(GenerateRequest(id="x", prompt=Prompt([1]), params=SamplingParams(**options)))
    assert refused.value.param == param


def test_a_function_on_the_host_sees_the_output_and_decides(engine: Engine) -> None:
    seen: list[list[int]] = []

    def alternate(output: list[int], logits_V: np.ndarray) -> np.ndarray:
        seen.append(output)
        logits_V[30 + len(output) % 2] = 1e6
        return logits_V

    free = run(engine, PROMPTS, SamplingParams(**FREE))
    params = [
        SamplingParams(**FREE),
        SamplingParams(**FREE, logits_processors=[alternate]),
        *[SamplingParams(**FREE)] * 2,
    ]
    found = run(engine, PROMPTS, params)
    assert found[1] == [30, 31] * 7
    assert seen == [found[1][:n] for n in range(14)]
    assert [found[i] for i in (0, 2, 3)] == [free[i] for i in (0, 2, 3)]


def test_a_function_on_the_host_that_fails_ends_its_own_request_and_says_why(
    engine: Engine,
) -> None:
    def broken(output: list[int], logits_V: np.ndarray) -> np.ndarray:
        return logits_V if len(output) < 3 else logits_V[: 1 // 0]

    params = [SamplingParams(**FREE), SamplingParams(**FREE, logits_processors=[broken])]
    deltas = collect(
        engine,
        [
            GenerateRequest(id=str(i), prompt=Prompt(PROMPTS[i]), params=p)
            for i, p in enumerate(params)
        ],
    )
    failed = [delta for delta in deltas if delta.id == "1"][-1]
    assert (
        failed.error == "the logits processor broken raised ZeroDivisionError: "
        "integer division or modulo by zero"
    )
    assert [d.finish_reason for d in deltas if d.id == "0"][-1] == "length"
    assert outcomes(engine, PROMPTS[:1], params[:1])[0].tokens == [
        t for d in deltas if d.id == "0" for t in d.token_ids
    ]


def forgetful(output: list[int], logits_V: np.ndarray) -> None:
    """Returns nothing, as people do who are used to change arrays in place."""
    logits_V[7] += 100


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            forgetful,
            f"the logits processor forgetful returned nothing; it must return the {V} logits",
        ),
        (lambda output, logits_V: 3.0, r"returned an array of shape \(\)"),
        (lambda output, logits_V: logits_V[:1], r"returned an array of shape \(1,\)"),
        (lambda output, logits_V: logits_V[None], r"returned an array of shape \(1, 104\)"),
        (lambda output, logits_V: logits_V * np.nan, r"not numbers \(NaN\)"),
        (lambda output, logits_V: "abc", "raised ValueError"),
        (
            lambda prompt, output, logits_V: logits_V,
            "the logits processor <lambda> raised TypeError",
        ),
    ],
    ids=range(7),
)
def test_what_a_function_on_the_host_must_return_is_said_and_others_go_on(
    engine: Engine, function: Any, says: str
) -> None:
    params = [SamplingParams(**FREE), SamplingParams(**FREE, logits_processors=[function])]
    deltas = collect(
        engine,
        [
            GenerateRequest(id=str(i), prompt=Prompt(PROMPTS[i]), params=p)
            for i, p in enumerate(params)
        ],
    )
    (failed,) = [delta for delta in deltas if delta.id == "1"]
    assert failed.finish_reason == "error"
    assert re.search(says, failed.error or ""), failed.error
    assert [t for d in deltas if d.id == "0" for t in d.token_ids] == run(
        engine, PROMPTS[:1], SamplingParams(**FREE)
    )[0]


def test_functions_on_the_host_run_one_after_another_and_may_return_any_row_of_numbers(
    engine: Engine,
) -> None:
    def first(output: list[int], logits_V: np.ndarray) -> Any:
        return [float(x) for x in np.where(np.arange(V) == 31, 500.0, logits_V)]

    def second(output: list[int], logits_V: np.ndarray) -> Any:
        return jnp.where(jnp.arange(V) == 32, logits_V[31] + 1, logits_V)

    assert run(engine, PROMPTS[:1], SamplingParams(**FREE, logits_processors=[first, second])) == [
        [32] * 14
    ]
    assert run(engine, PROMPTS[:1], SamplingParams(**FREE, logits_processors=[second, first])) == [
        [31] * 14
    ]


@pytest.mark.parametrize(
    ("options", "holds"),
    [
        ({"allowed_token_ids": [8, 9]}, lambda said: set(said) <= {8, 9}),
        ({"bad_words": ["7"]}, lambda said: 7 not in said),
        ({"bad_words": ["7 7"]}, lambda said: 7 in said and (7, 7) not in pairwise(said)),
        ({"min_tokens": 9, "stop_token_ids": [7]}, lambda said: said.index(7) == 9),
    ],
    ids=["allowed", "bad word", "bad words", "min_tokens"],
)
def test_functions_on_the_host_undo_no_ban(
    engine: Engine, options: dict[str, Any], holds: Callable[[list[int]], bool]
) -> None:
    def undo(output: list[int], logits_V: np.ndarray) -> np.ndarray:
        return np.where(np.arange(V) == 7, 1e6, np.nan_to_num(logits_V, neginf=0))

    (said,) = run(
        reading_words(engine),
        PROMPTS[:1],
        SamplingParams(**FREE, logits_processors=[undo], **options),
    )
    assert holds(said), said


@pytest.mark.parametrize(
    ("functions", "says"),
    [
        ([3], "functions with names"),
        ([push, push], "two functions named push"),
        (
            [lambda logits_SV, state, *, words="a": logits_SV],
            "the default of words must be a number",
        ),
        ([lambda logits_SV, state: logits_SV[:, :3]], "cannot be traced"),
        ([lambda logits_SV: logits_SV], "cannot be traced"),
        ([lambda logits_SV, state: logits_SV * np.float64(2) + state.nothing], "cannot be traced"),
    ],
    ids=range(6),
)
def test_what_is_no_processor_is_said_at_start(functions: list[Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_processors(functions, V)


@pytest.mark.slow
def test_the_example_of_the_page_runs() -> None:
    page = (pathlib.Path(__file__).parents[3] / "docs" / "sampling.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip()
