"""What `process` must compute, in numpy float64, one row at a time and straight from the
definitions."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.sampling.bits import everything, packed
from jaxllm.sampling.options import COLUMNS, MAX_LOGIT_BIAS, PROCESS_COLUMNS, SamplingParams
from jaxllm.sampling.process import LogitsParams, ProcessRows, process
from tests.sampling.oracle import OPTIMISED


def expected(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """One row's logits as asked."""
    out = np.asarray(logits, np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        out[token] += bias
    for token in {*prompt, *output}:
        out[token] = (
            out[token] / params.repetition_penalty
            if out[token] > 0
            else out[token] * params.repetition_penalty
        )
    for token in set(output):
        out[token] -= params.frequency_penalty * list(output).count(token)
        out[token] -= params.presence_penalty
    if params.allowed_token_ids is not None:
        out[[token for token in range(len(out)) if token not in params.allowed_token_ids]] = -np.inf
    return out


def terms_of(
    requests: Sequence[tuple[SamplingParams, Sequence[int]]], vocab_size: int
) -> LogitsParams:
    """The terms of (params, prompt) in slots 0, 1, …, and a trash slot."""
    terms = jax.tree.map(
        lambda s: np.zeros(s.shape, s.dtype), LogitsParams.shapes(len(requests), vocab_size)
    )
    terms.bias_ids[:] = vocab_size + np.arange(MAX_LOGIT_BIAS)
    for slot, (params, prompt) in enumerate(requests):
        for at, (token, bias) in enumerate((params.logit_bias or {}).items()):
            terms.bias_ids[slot, at], terms.biases[slot, at] = token, bias
        terms.prompt[slot] = packed(prompt, vocab_size)
        allowed = params.allowed_token_ids
        terms.allowed[slot] = (
            everything(vocab_size) if allowed is None else packed(allowed, vocab_size)
        )
    return terms


def counts_of(outputs: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray:
    """The counts of the slots' outputs, and of a trash slot."""
    return np.array(
        [np.bincount(np.array(said, np.int64), minlength=vocab_size) for said in [*outputs, []]],
        np.uint16,
    )


@functools.partial(jax.jit, compiler_options=OPTIMISED)
def run(
    logits_QV: jax.Array, rows: ProcessRows, counts_SV: jax.Array, terms: LogitsParams
) -> tuple[jax.Array, jax.Array]:
    """`process`, compiled."""
    return process(logits_QV, rows, counts_SV, terms)


def rows_of(
    slots: Sequence[int],
    requests: Sequence[SamplingParams],
    asks: Sequence[bool] | bool = True,
    drew: Sequence[bool] | bool = False,
    token: object = 0,
) -> ProcessRows:
    """Rows of these slots, whose requests are given in the order of slots, as to `terms_of`;
    scalars are repeated. The trash slot's penalties are 0."""
    n = len(slots)
    wide = [np.broadcast_to(np.asarray(x), (n,)) for x in (asks, drew)]
    tokens = np.broadcast_to(np.asarray(token), (n,))
    zeros = jnp.zeros(n, jnp.int32)
    columns = {
        name: [COLUMNS[name].encode(getattr(p, name)) for p in requests] for name in PROCESS_COLUMNS
    }
    return ProcessRows(
        jnp.array(slots, jnp.int32),
        *map(jnp.array, wide),
        jnp.array(tokens, jnp.int32),
        zeros,
        zeros,
        **{
            f"{name}_Q": jnp.array([*column, 0], COLUMNS[name].dtype)[jnp.array(slots)]
            for name, column in columns.items()
        },
    )
