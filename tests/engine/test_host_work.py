"""What a step costs the host per row, counted in calls of Python functions, which is the same on
every machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from jaxllm.engine.engine import Engine
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from tests.engine.conftest import collect

WARM, STEPS = 9, 5  # of prompts of 2 tokens on pages of 8: no page is opened or completed meanwhile


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often functions of jaxllm are called or resumed."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and "/jaxllm/" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def calls_of(engine: Engine, rows: int, options: dict[str, Any]) -> Counter[str]:
    """In `STEPS` steps in which so many rows decode."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, **options)
    for row in range(rows):
        engine.add(GenerateRequest(id=str(row), prompt=Prompt([row, 1]), params=params))
    for _ in range(WARM):
        engine.step()
    with counted() as calls:
        deltas = [delta for _ in range(STEPS) for delta in engine.step()]
    assert len(deltas) == rows * STEPS
    collect(engine, [])
    return calls


@pytest.mark.parametrize(
    ("options", "most"), [({}, 2), ({"stop_token_ids": [7], "seed": 5}, 2), ({"logprobs": 5}, 3)]
)
def test_a_row_takes_few_calls(engine: Engine, options: dict[str, Any], most: int) -> None:
    few, many = (calls_of(engine, rows, options) for rows in (1, 4))
    per_row = {
        name: (many[name] - few[name]) / (3 * STEPS) for name in many if many[name] != few[name]
    }
    assert sum(per_row.values()) <= most, f"calls per row and step: {per_row}"
