"""Bias, penalties, processors and masks of logits. Rows of requests without such options keep
every bit.

In this order (docs/sampling.md has the steps before and after):

1. `logit_bias` is added;
2. `repetition_penalty` divides the logit of a token of prompt or output where it is positive, and
  multiplies it where it is negative;
3. `frequency_penalty` times the token's count in the output is subtracted, then `presence_penalty`
  if the count is not 0;
4. processors of research code (`sampling.processors`) run in the order of their list;
5. tokens that are not allowed become minus infinity, which processors see already.

All but the fourth is one pass over the vocabulary. Logits with a bias are few; they are computed
separately and written over the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.sampling.bits import WORD, words_of
from jaxllm.sampling.options import MAX_LOGIT_BIAS
from jaxllm.sampling.processor_arguments import Processor, custom_width
from jaxllm.sampling.processors import ProcessorState, apply_processor

MOST = 2**16 - 1  # greatest count of a token


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitsParams:
    """What requests in S slots, and the trash slot S, ask of single tokens. Slots of requests that
    ask nothing hold anything.

    Attributes:
        bias_ids: [S+1, K] int32, distinct; V or more for unused entries.
        biases: [S+1, K] float32.
        prompt: [S+1, W] uint32; the prompt's tokens as `sampling.bits`.
        allowed: [S+1, W] uint32; the tokens that may come next.
        custom: [S+1, C] float32; for each processor whether it is enabled, then its arguments.
    """

    bias_ids: Array
    biases: Array
    prompt: Array
    allowed: Array
    custom: Array

    @staticmethod
    def shapes(slots: int, vocab_size: int, processors: Sequence[Processor] = ()) -> LogitsParams:
        """Shapes and dtypes of the fields."""
        shape = jax.ShapeDtypeStruct
        words = words_of(vocab_size)
        return LogitsParams(
            bias_ids=shape((slots + 1, MAX_LOGIT_BIAS), jnp.int32),
            biases=shape((slots + 1, MAX_LOGIT_BIAS), jnp.float32),
            prompt=shape((slots + 1, words), jnp.uint32),
            allowed=shape((slots + 1, words), jnp.uint32),
            custom=shape((slots + 1, custom_width(processors)), jnp.float32),
        )


def logits_params_bytes(slots: int, vocab_size: int) -> int:
    """Bytes of `LogitsParams` without processors."""
    return sum(
        int(np.prod(s.shape)) * s.dtype.itemsize
        for s in jax.tree.leaves(LogitsParams.shapes(slots, vocab_size))
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProcessRows:
    """The requests of Q rows of logits.

    Attributes:
        slot_Q: int32.
        active_Q: bool; the row's request has an option that `process` serves.
        drew_Q: bool; a token was drawn since the last call.
        token_Q: int32; that token.
        position_Q: int32; of the token to be drawn.
        prompt_length_Q: int32; tokens.
        repetition_penalty_Q, frequency_penalty_Q, presence_penalty_Q: float32; the options.
    """

    slot_Q: Array
    active_Q: Array
    drew_Q: Array
    token_Q: Array
    position_Q: Array
    prompt_length_Q: Array
    repetition_penalty_Q: Array
    frequency_penalty_Q: Array
    presence_penalty_Q: Array


def process(
    logits_QV: Array,
    rows: ProcessRows,
    counts_SV: Array,
    params: LogitsParams,
    processors: Sequence[Processor] = (),
) -> tuple[Array, Array]:
    """(counts with the tokens drawn, changed logits). `counts_SV` is uint16 `[S+1, V]`: how often
    each slot's output has each token."""
    counts_SV = _count(counts_SV, rows)
    slot_Q = rows.slot_Q
    size = logits_QV.shape[1]
    prompt_QV = _expanded(params.prompt[slot_Q], size)
    allowed_QV = _expanded(params.allowed[slot_Q], size)
    changed_QV = jnp.where(
        allowed_QV, _penalised(logits_QV, counts_SV[slot_Q], prompt_QV, rows), -jnp.inf
    )
    changed_QV = jnp.where(rows.active_Q[:, None], changed_QV, logits_QV)
    changed_QV = _with_biases(changed_QV, logits_QV, rows, counts_SV, params)
    if processors:
        state = ProcessorState(counts_SV[slot_Q], prompt_QV, rows.position_Q, rows.prompt_length_Q)
        for processor in processors:
            changed_QV = apply_processor(
                processor,
                changed_QV,
                state,
                jnp.where(rows.active_Q[:, None], params.custom[slot_Q], 0.0),
            )
        changed_QV = jnp.where(allowed_QV | ~rows.active_Q[:, None], changed_QV, -jnp.inf)
    return counts_SV, changed_QV


def set_slot_params(
    counts_SV: Array, params: LogitsParams, new: dict[str, Array]
) -> tuple[Array, LogitsParams]:
    """Write a slot's row of `params` from `new`, and add the tokens `new["said"]` to its counts,
    which start from zero when `new["first"]` is set."""
    slot = new["slot"][0]
    count_V = jnp.where(new["first"][0] != 0, 0, counts_SV[slot].astype(jnp.int32))
    count_V = count_V.at[new["said"]].add(1, mode="drop")
    counts_SV = counts_SV.at[slot].set(jnp.minimum(count_V, MOST).astype(counts_SV.dtype))
    rows = {name: getattr(params, name).at[slot].set(new[name]) for name in vars(params)}
    return counts_SV, LogitsParams(**rows)


def _count(counts_SV: Array, rows: ProcessRows) -> Array:
    """The counts with the tokens drawn. Rows without one get distinct indices beyond the last slot,
    which drops them."""
    beyond_Q = counts_SV.shape[0] + jnp.arange(rows.slot_Q.shape[0], dtype=jnp.int32)
    token_Q = jnp.maximum(rows.token_Q, 0)
    more_Q = jnp.minimum(counts_SV[rows.slot_Q, token_Q], MOST - 1) + 1
    slot_Q = jnp.where(rows.drew_Q, rows.slot_Q, beyond_Q)
    return counts_SV.at[slot_Q, token_Q].set(
        more_Q.astype(counts_SV.dtype), mode="drop", unique_indices=True
    )


def _penalised(logits: Array, count: Array, in_prompt: Array, rows: ProcessRows) -> Array:
    """`logits [Q, n]` with the penalties of tokens that occur `count` times in the output."""
    repetition = rows.repetition_penalty_Q[:, None]
    said = count > 0
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_prompt | said, repeated, logits)
    logits = logits - rows.frequency_penalty_Q[:, None] * count.astype(jnp.float32)
    return logits - jnp.where(said, rows.presence_penalty_Q[:, None], 0.0)


def _with_biases(
    changed_QV: Array, logits_QV: Array, rows: ProcessRows, counts_SV: Array, params: LogitsParams
) -> Array:
    """`changed_QV` with the logits of biased tokens computed from the start, bias first."""
    size = logits_QV.shape[1]
    slot_Q1 = rows.slot_Q[:, None]
    ids_QK = params.bias_ids[rows.slot_Q]
    at_QK = jnp.minimum(ids_QK, size - 1)
    biased_QK = jnp.take_along_axis(logits_QV, at_QK, axis=1) + params.biases[rows.slot_Q]
    in_prompt_QK, allowed_QK = (
        _bit(bits, slot_Q1, at_QK) for bits in (params.prompt, params.allowed)
    )
    biased_QK = _penalised(biased_QK, counts_SV[slot_Q1, at_QK], in_prompt_QK, rows)
    biased_QK = jnp.where(allowed_QK, biased_QK, -jnp.inf)
    ids_QK = jnp.where(rows.active_Q[:, None], ids_QK, ids_QK + size)
    row_Q1 = jnp.arange(changed_QV.shape[0], dtype=jnp.int32)[:, None]
    return changed_QV.at[row_Q1, ids_QK].set(biased_QK, mode="drop", unique_indices=True)


def _expanded(bits_QW: Array, size: int) -> Array:
    """bool `[Q, size]` from packed bits."""
    flags_QWb = bits_QW[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32) & 1
    return flags_QWb.reshape(bits_QW.shape[0], -1)[:, :size] != 0


def _bit(bits_SW: Array, slot_Q1: Array, ids_QK: Array) -> Array:
    """bool `[Q, K]`: whether these tokens are in the slots' sets."""
    return bits_SW[slot_Q1, ids_QK // WORD] >> (ids_QK % WORD).astype(jnp.uint32) & 1 != 0
