"""What the demo model thinks of known text, with its weights held in some format."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm import models, weights
from jaxllm.locate import locate
from jaxllm.mesh import make_mesh
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.quantisation import ONLINE, WeightFormat
from jaxllm.tokenizer import Tokenizer

LENGTH = 1024  # tokens of a batch of conversations
# Numbers of checkpoints, which plain weights are rounded to here alone, with scales of floats
CHECKPOINTS = {
    "4-bit floats, groups of 32": WeightFormat("fp4", 32, rounded=True),
    "4-bit floats, groups of 16": WeightFormat("fp4", 16, rounded=True),
    "nf4, groups of 64": WeightFormat("nf4", 64, rounded=True),
}
FORMATS: Mapping[str, WeightFormat] = {**ONLINE, **CHECKPOINTS}

type Text = tuple[list[int], list[int]]  # a prompt, and its answer
# Of all tokens of a text but the first, where its answer begins, and wrong tokens of the answer
type Loss = tuple[np.ndarray, int, int]


class Found(NamedTuple):
    """Perplexity of prompts with answers, of answers alone, and how many tokens of answers are not
    the likeliest."""

    perplexity: float
    answers: float
    wrong: int


def held_out(number: int) -> list[Text]:
    """Conversations that the training text does not have, `number` of each kind."""
    from examples.demo_model.skills.cases import skill_cases
    from examples.demo_model.tokenizer import renderer

    tokenizer = Tokenizer.load(locate("demo", None, None))
    cases = skill_cases(renderer(), random.Random(1), number)
    found = [(tokenizer.encode(case.prompt), tokenizer.encode(case.text)) for case in cases]
    return [text for text in found if sum(map(len, text)) <= LENGTH // 2]


def batches(texts: list[Text]) -> list[list[Text]]:
    """Texts that are read in one step each."""
    found: list[list[Text]] = [[]]
    for text in texts:
        if sum(len(p) + len(a) for p, a in (*found[-1], text)) > LENGTH:
            found.append([])
        found[-1].append(text)
    return found


def measured(kind: WeightFormat | None, texts: list[Text]) -> Found:
    """The demo model's, with its linear maps in this format; computed in float32."""
    directory = locate("demo", None, None)
    spec = models.read_spec(directory)
    names = {} if kind is None else weights.weight_formats(directory, spec, next(iter(ONLINE)))
    spec = replace(spec, formats={} if kind is None else dict.fromkeys(names, kind))
    graphdef, state = weights.load(directory, weights.outline(spec, make_mesh(1), jnp.float32))

    @jax.jit
    def scores(state: nnx.State, token_T: jax.Array, position_T: jax.Array, segment_T: jax.Array):  # type: ignore[no-untyped-def]
        model = nnx.merge(graphdef, state)
        context = DenseContext(segment_T)
        hidden_TD = model(token_T, position_T, context)
        return jax.nn.log_softmax(model.logits(hidden_TD, context))

    read = functools.partial(scores, state)
    every = [each for batch in batches(texts) for each in _read(read, batch)]
    return Found(
        perplexity([losses for losses, _, _ in every]),
        perplexity([losses[first:] for losses, first, _ in every]),
        sum(wrong for _, _, wrong in every),
    )


def perplexity(losses: list[np.ndarray]) -> float:
    """Of tokens with these losses."""
    return float(np.exp(np.concatenate(losses).mean()))


def _read(scores: Callable[..., jax.Array], batch: list[Text]) -> Iterator[Loss]:
    """Of each text in a batch."""
    token_T, position_T, segment_T = np.zeros((3, LENGTH), np.int32)
    segment_T[:] = -1
    ends = np.cumsum([len(prompt) + len(answer) for prompt, answer in batch])
    for number, ((prompt, answer), end) in enumerate(zip(batch, ends, strict=True)):
        start = end - len(prompt) - len(answer)
        token_T[start:end], segment_T[start:end] = prompt + answer, number
        position_T[start:end] = range(end - start)
    score_TV = np.asarray(scores(token_T, position_T, segment_T))
    for (prompt, answer), end in zip(batch, ends, strict=True):
        start, first = end - len(prompt) - len(answer), len(prompt) - 1
        losses = -score_TV[np.arange(start, end - 1), token_T[start + 1 : end]]
        likeliest = score_TV[start + first : end - 1].argmax(axis=1)
        yield losses, first, int((likeliest != answer).sum())
