"""Logits to the logits that requests asked for: bias, penalties, masks. Rows that ask for none of
them stay as they are.

In this order (docs/sampling.md has all of it):

1. `logit_bias` is added;
2. `repetition_penalty` divides the logit of a token of prompt or output where it is positive, and
  multiplies it where it is negative;
3. `frequency_penalty` times the token's count in the output is subtracted, then `presence_penalty`
  if the count is not 0;
4. processors of research code (`sampling.processors`) do what they do, in the order of their list;
5. tokens that are not allowed become impossible (minus infinity); processors see them so already.

All but the fourth is one pass over the vocabulary; biased tokens, few as they are, are computed
beside it and written over it.
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

MOST = 2**16 - 1  # occurrences that are told apart


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitsParams:
    """What requests in S slots ask for, and the trash slot S. Slots whose request asks for nothing
    hold anything."""

    penalties: Array  # [S+1, 3] float32: repetition, frequency, presence
    bias_ids: Array  # [S+1, K] int32, distinct; those of no token are V or more
    biases: Array  # [S+1, K] float32
    prompt: Array  # [S+1, W] uint32: bits of the prompt's tokens
    allowed: Array  # [S+1, W] uint32: bits of the tokens that may be said next
    custom: Array  # [S+1, C] float32: for each processor whether it is enabled, and its arguments

    @staticmethod
    def shapes(slots: int, vocab_size: int, processors: Sequence[Processor] = ()) -> LogitsParams:
        """As ShapeDtypeStructs."""
        shape, words = jax.ShapeDtypeStruct, words_of(vocab_size)
        return LogitsParams(
            penalties=shape((slots + 1, 3), jnp.float32),
            bias_ids=shape((slots + 1, MAX_LOGIT_BIAS), jnp.int32),
            biases=shape((slots + 1, MAX_LOGIT_BIAS), jnp.float32),
            prompt=shape((slots + 1, words), jnp.uint32),
            allowed=shape((slots + 1, words), jnp.uint32),
            custom=shape((slots + 1, custom_width(processors)), jnp.float32),
        )


def logits_params_bytes(slots: int, vocab_size: int) -> int:
    """Bytes of `LogitsParams`."""
    return sum(
        int(np.prod(s.shape)) * s.dtype.itemsize
        for s in jax.tree.leaves(LogitsParams.shapes(slots, vocab_size))
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProcessRows:
    """Whose logits Q rows are, which of them ask for something, and for which a token was drawn
    since the last call."""

    slot_Q: Array  # int32
    asks_Q: Array  # bool
    drew_Q: Array  # bool
    token_Q: Array  # int32; the token drawn
    position_Q: Array  # int32, of the token to be drawn
    prompt_length_Q: Array  # int32


def process(
    logits_QV: Array,
    rows: ProcessRows,
    counts_SV: Array,
    terms: LogitsParams,
    processors: Sequence[Processor] = (),
) -> tuple[Array, Array]:
    """(counts with the tokens drawn, logits as asked). `counts_SV` is uint16 `[S+1, V]`: how often
    each slot's output has each token."""
    counts_SV = _count(counts_SV, rows)
    slot_Q = rows.slot_Q
    size = logits_QV.shape[1]
    penalties_Q3 = terms.penalties[slot_Q]
    prompt_QV = _expanded(terms.prompt[slot_Q], size)
    allowed_QV = _expanded(terms.allowed[slot_Q], size)
    asked_QV = jnp.where(
        allowed_QV, _penalised(logits_QV, counts_SV[slot_Q], prompt_QV, penalties_Q3), -jnp.inf
    )
    asked_QV = jnp.where(rows.asks_Q[:, None], asked_QV, logits_QV)
    asked_QV = _with_biases(asked_QV, logits_QV, rows, counts_SV, terms)
    if processors:
        state = ProcessorState(counts_SV[slot_Q], prompt_QV, rows.position_Q, rows.prompt_length_Q)
        for processor in processors:
            asked_QV = apply_processor(
                processor,
                asked_QV,
                state,
                jnp.where(rows.asks_Q[:, None], terms.custom[slot_Q], 0.0),
            )
        asked_QV = jnp.where(allowed_QV | ~rows.asks_Q[:, None], asked_QV, -jnp.inf)
    return counts_SV, asked_QV


def set_slot_params(
    counts_SV: Array, terms: LogitsParams, new: dict[str, Array]
) -> tuple[Array, LogitsParams]:
    """A slot's row of `terms` from `new`, and its counts plus the tokens `new["said"]`, from zero
    when `new["first"]` is set."""
    slot = new["slot"][0]
    count_V = jnp.where(new["first"][0] != 0, 0, counts_SV[slot].astype(jnp.int32))
    count_V = count_V.at[new["said"]].add(1, mode="drop")
    counts_SV = counts_SV.at[slot].set(jnp.minimum(count_V, MOST).astype(counts_SV.dtype))
    rows = {name: getattr(terms, name).at[slot].set(new[name]) for name in vars(terms)}
    return counts_SV, LogitsParams(**rows)


def _count(counts_SV: Array, rows: ProcessRows) -> Array:
    """The counts with one more of each token drawn. Rows without one have an index of their own
    beyond the last slot, which drops them."""
    beyond_Q = counts_SV.shape[0] + jnp.arange(rows.slot_Q.shape[0], dtype=jnp.int32)
    token_Q = jnp.maximum(rows.token_Q, 0)
    more_Q = jnp.minimum(counts_SV[rows.slot_Q, token_Q], MOST - 1) + 1
    slot_Q = jnp.where(rows.drew_Q, rows.slot_Q, beyond_Q)
    return counts_SV.at[slot_Q, token_Q].set(
        more_Q.astype(counts_SV.dtype), mode="drop", unique_indices=True
    )


def _penalised(logits: Array, count: Array, in_prompt: Array, penalties_Q3: Array) -> Array:
    """`logits [Q, n]` of tokens that were said `count` times."""
    repetition, frequency, presence = (penalties_Q3[:, i, None] for i in range(3))
    said = count > 0
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_prompt | said, repeated, logits)
    return logits - frequency * count.astype(jnp.float32) - jnp.where(said, presence, 0.0)


def _with_biases(
    asked_QV: Array, logits_QV: Array, rows: ProcessRows, counts_SV: Array, terms: LogitsParams
) -> Array:
    """`asked_QV` with the tokens that have a bias computed anew, bias first."""
    size = logits_QV.shape[1]
    slot_Q1, ids_QK = rows.slot_Q[:, None], terms.bias_ids[rows.slot_Q]
    at_QK = jnp.minimum(ids_QK, size - 1)
    biased_QK = jnp.take_along_axis(logits_QV, at_QK, axis=1) + terms.biases[rows.slot_Q]
    in_prompt_QK, allowed_QK = (
        _bit(bits, slot_Q1, at_QK) for bits in (terms.prompt, terms.allowed)
    )
    biased_QK = _penalised(
        biased_QK, counts_SV[slot_Q1, at_QK], in_prompt_QK, terms.penalties[rows.slot_Q]
    )
    biased_QK = jnp.where(allowed_QK, biased_QK, -jnp.inf)
    ids_QK = jnp.where(rows.asks_Q[:, None], ids_QK, ids_QK + size)
    row_Q1 = jnp.arange(asked_QV.shape[0], dtype=jnp.int32)[:, None]
    return asked_QV.at[row_Q1, ids_QK].set(biased_QK, mode="drop", unique_indices=True)


def _expanded(bits_QW: Array, size: int) -> Array:
    """bool `[Q, size]` from packed bits."""
    flags_QWb = bits_QW[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32) & 1
    return flags_QWb.reshape(bits_QW.shape[0], -1)[:, :size] != 0


def _bit(bits_SW: Array, slot_Q1: Array, ids_QK: Array) -> Array:
    """bool `[Q, K]`: the bits of some tokens."""
    return bits_SW[slot_Q1, ids_QK // WORD] >> (ids_QK % WORD).astype(jnp.uint32) & 1 != 0
