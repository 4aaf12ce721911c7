"""A launch is plain data: another engine that replays it has the same state and tokens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import jax
import numpy as np

from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime.launch import Launch
from jaxllm.engine.runtime.program import COUNTS, LOGITS_PARAMS, Key
from jaxllm.engine.runtime.runner import Runner
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect, run

WISHES = {"max_num_seqs": 4, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 16}
MIXES = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 1, "top_p": 0.8},
    {"repetition_penalty": 1.3, "logit_bias": {5: 2.0}, "logprobs": 3},
    {"prompt_logprobs": 2, "temperature": 0.0},
    {"n": 3, "seed": 4, "allowed_token_ids": list(range(40))},
)


def recorded(engine: Engine, monkeypatch) -> tuple[list[bytes], list[np.ndarray]]:
    """Launches of a run as bytes, and their results."""
    launches, results, run = list[bytes](), list[np.ndarray](), engine.runner.run

    def note(launch: Launch) -> list[jax.Array]:
        launches.append(launch.to_bytes())
        found = run(launch)
        results.extend(map(np.asarray, found))
        return found

    monkeypatch.setattr(engine.runner, "run", note)
    requests = [
        GenerateRequest(
            id=str(at),
            prompt=Prompt([3 + at, 1] * (1 + 4 * at)),
            params=SamplingParams(max_tokens=9 + at, ignore_eos=True, **mix),
        )
        for at, mix in enumerate(MIXES)
    ]
    collect(engine, requests)
    return launches, results


def test_a_second_runner_that_replays_launches_has_the_same_state_and_tokens(
    make_engine: Callable[..., Engine], monkeypatch
) -> None:
    first, second = make_engine(**WISHES), make_engine(**WISHES)
    launches, results = recorded(first, monkeypatch)
    kinds = {key.program for data in launches for key, _ in Launch.from_bytes(data).calls}
    assert kinds >= {
        "extend",
        "decode",
        "update_slots",
        "copy_pages",
        "set_slot",
        "process_logits",
        "sample",
        "logprobs",
        "prompt_logprobs",
    }
    found = [
        np.asarray(result)
        for data in launches
        for result in second.runner.run(Launch.from_bytes(data))
    ]
    for mine, theirs in zip(found, results, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(resident(second.runner), resident(first.runner), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def resident(runner: Runner) -> list[np.ndarray]:
    """Pages, slot state and logits parameters."""
    device = runner._device
    arrays = runner.kv, runner.state, device.read(COUNTS), device.read(LOGITS_PARAMS)
    return [np.asarray(array) for array in jax.tree.leaves(arrays)]


def test_a_launch_survives_the_way_through_bytes() -> None:
    buffer = np.array([1, -2, 2**31 - 1], np.int32)
    launch = Launch(((Key("update_slots"), buffer), (Key("decode", (8,)), None)))
    (key, found), last = Launch.from_bytes(launch.to_bytes()).calls
    assert key == Key("update_slots") and last == (Key("decode", (8,)), None)
    np.testing.assert_array_equal(found, buffer)


def test_an_engine_that_is_dropped_takes_its_programs_along(make_engine):
    engine = make_engine()
    run(engine, [[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0))
    programs = weakref.ref(engine.runner.programs)
    del engine
    gc.collect()
    assert programs() is None
