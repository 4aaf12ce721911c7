"""What the demo model loses when its weights are rounded: of 8 bits less than one percent of the
perplexity of recorded conversations, and no greedy token; of 4 bits less than five percent, and few
tokens."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm import models, weights
from jaxllm.locate import locate
from jaxllm.mesh import make_mesh
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.quantisation import ONLINE
from pallas_kernels.scaled_matmul import rounding

GOLDENS = json.loads((Path(__file__).parents[1] / "demo/goldens.json").read_text())
ANSWERS = sum(len(own["answer_ids"]) for own in GOLDENS.values())
LENGTH = 1024  # tokens of a batch of conversations


class Found(NamedTuple):
    """Perplexity of prompts and answers, and how many tokens of answers are not the likeliest."""

    perplexity: float
    wrong: int


def batches() -> list[list[tuple[list[int], list[int]]]]:
    found: list[list[tuple[list[int], list[int]]]] = [[]]
    for own in GOLDENS.values():
        text = own["prompt_ids"], own["answer_ids"]
        if sum(len(p) + len(a) for p, a in (*found[-1], text)) > LENGTH:
            found.append([])
        found[-1].append(text)
    return found


@functools.cache
def measured(wish: str | None) -> Found:
    directory = locate("demo", None, None)
    spec = models.read_spec(directory)
    spec = replace(spec, formats=weights.weight_formats(directory, spec, wish))
    graphdef, state = weights.load(directory, spec, make_mesh(1), jnp.float32)

    @jax.jit
    def scores(state, token_T, position_T, segment_T):
        model = nnx.merge(graphdef, state)
        return jax.nn.log_softmax(model.logits(model(token_T, position_T, DenseContext(segment_T))))

    losses, wrong = [], 0
    for batch in batches():
        token_T, position_T, segment_T = np.zeros((3, LENGTH), np.int32)
        segment_T[:] = -1
        end = 0
        for number, (prompt, answer) in enumerate(batch):
            start, end = end, end + len(prompt) + len(answer)
            token_T[start:end], segment_T[start:end] = prompt + answer, number
            position_T[start:end] = range(end - start)
        score_TV = np.asarray(scores(state, token_T, position_T, segment_T))
        end = 0
        for prompt, answer in batch:
            start, end = end, end + len(prompt) + len(answer)
            losses.append(-score_TV[np.arange(start, end - 1), token_T[start + 1 : end]])
            likeliest = score_TV[start + len(prompt) - 1 : end - 1].argmax(axis=1)
            wrong += int((likeliest != answer).sum())
    return Found(float(np.exp(np.concatenate(losses).mean())), wrong)


@pytest.mark.slow
@pytest.mark.parametrize("wish", sorted(ONLINE))
def test_few_bits_cost_little_of_the_perplexity(wish: str) -> None:
    plain, found = measured(None), measured(wish)
    few = ONLINE[wish].numbers == "int4"
    assert abs(found.perplexity / plain.perplexity - 1) < (0.05 if few else 0.01)
    assert plain.wrong == 0 and found.wrong <= few * ANSWERS / 100


@pytest.mark.slow
def test_3_bits_would_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = measured(None)
    monkeypatch.setattr(rounding, "largest", lambda dtype: 3.0)
    coarse = measured.__wrapped__("int8_w8a16")
    assert abs(coarse.perplexity / plain.perplexity - 1) > 0.01 and coarse.wrong > 0
