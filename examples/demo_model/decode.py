"""Greedy decoding of many prompts at once with a plain key-value cache: small, and independent of
the engine that it judges."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.nn.contexts.dense import heads
from jaxllm.nn.contexts.rows import PlainRows
from pallas_kernels.rope_write import HeadRows

SHORT = 32  # answers of up to this many tokens run apart from longer ones
TOKENS = 16_384  # prompt tokens that run together at most


class CacheContext(PlainRows):
    """Attention of one row's new tokens over that row's whole cache. `keys` and `values` hold `[S,
    K, H]` for each layer."""

    prompt_length_T = None  # only dynamic RoPE scaling needs it

    def __init__(self, start: jax.Array, keys: list[jax.Array], values: list[jax.Array]):
        self.keys, self.values = list(keys), list(values)
        self._start = start

    def attend(
        self,
        layer: int,
        rows: HeadRows,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Write k and v from position `start` on; a token sees every position up to its own."""
        if window is not None or softcap is not None or sinks is not None:
            raise ValueError("CacheContext knows no sliding windows, soft caps and sinks")
        q_TNH, k_TKH, v_TKH = heads(rows)
        key_SKH = self.keys[layer] = jax.lax.dynamic_update_slice(
            self.keys[layer], k_TKH, (self._start, 0, 0)
        )
        value_SKH = self.values[layer] = jax.lax.dynamic_update_slice(
            self.values[layer], v_TKH, (self._start, 0, 0)
        )
        tokens, kv_heads = k_TKH.shape[:2]
        q = q_TNH.reshape(tokens, kv_heads, -1, q_TNH.shape[-1])
        score = jnp.einsum("tkgh,skh->kgts", q, key_SKH, preferred_element_type=jnp.float32) * scale
        seen_TS = jnp.arange(len(key_SKH))[None] <= self._start + jnp.arange(tokens)[:, None]
        weight = jax.nn.softmax(jnp.where(seen_TS, score, -jnp.inf), axis=-1).astype(
            value_SKH.dtype
        )
        return jnp.einsum("kgts,skh->tkgh", weight, value_SKH).reshape(q_TNH.shape)


@partial(jax.jit, static_argnames=("room", "stop"))
def _generate(
    graph: nnx.GraphDef,
    state: nnx.State,
    prompt_BT: jax.Array,
    size_B: jax.Array,
    new: jax.Array,
    room: int,
    stop: tuple[int, ...],
) -> jax.Array:
    """`[B, room]` greedy tokens after each row's first `size_B` prompt tokens; -1 from a row's end
    on. At most `new` are drawn."""
    model = nnx.merge(graph, state)
    rows, length = prompt_BT.shape
    attention = model.layers[0].attention.heads
    empty = [
        jnp.zeros((rows, length + room, attention.kv, attention.dim), model.embed.weight.dtype)
        for _ in model.layers
    ]

    def run(
        token_T: jax.Array, start: jax.Array, keys: list[jax.Array], values: list[jax.Array]
    ) -> tuple:
        context = CacheContext(start, keys, values)
        return (
            model(token_T, start + jnp.arange(len(token_T)), context),
            context.keys,
            context.values,
        )

    def choose(hidden_BD: jax.Array) -> jax.Array:
        return model.logits(hidden_BD, PlainRows()).argmax(-1).astype(jnp.int32)

    def more(carry: tuple) -> jax.Array:
        step, _, token_B, _, _ = carry
        return (step < new) & (token_B >= 0).any()

    def body(carry: tuple) -> tuple:
        step, out_BR, token_B, keys, values = carry
        out_BR = out_BR.at[:, step].set(token_B)
        stopped_B = (token_B < 0) | (token_B[:, None] == jnp.array(stop)).any(1)
        hidden_BTD, keys, values = jax.vmap(run)(
            jnp.maximum(token_B, 0)[:, None], size_B + step, keys, values
        )
        return step + 1, out_BR, jnp.where(stopped_B, -1, choose(hidden_BTD[:, 0])), keys, values

    hidden_BTD, keys, values = jax.vmap(run)(prompt_BT, jnp.zeros(rows, jnp.int32), empty, empty)
    first_B = choose(hidden_BTD[jnp.arange(rows), size_B - 1])
    return jax.lax.while_loop(
        more, body, (jnp.int32(0), jnp.full((rows, room), -1), first_B, keys, values)
    )[1]


def _batches(
    prompts: list[list[int]], limits: list[int], rows: int
) -> Iterator[tuple[list[int], int, int, int]]:
    """Prompts that run together, as (indices, rows, prompt length, room): like sizes, few different
    shapes, bounded memory."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        length = 64
        while length < len(prompt):
            length *= 4
        groups.setdefault((length, SHORT if limit <= SHORT else max(limits)), []).append(i)
    for (length, room), members in sorted(groups.items()):
        size = max(1, min(rows, TOKENS // length, 1 << (len(members) - 1).bit_length()))
        for begin in range(0, len(members), size):
            yield members[begin : begin + size], size, length, room


def greedy(
    model: nnx.Module,
    prompts: list[list[int]],
    limits: list[int],
    stop: tuple[int, ...],
    rows: int = 256,
) -> list[list[int]]:
    """The greedy continuation of each prompt, stop token included, at most its limit of tokens; up
    to `rows` prompts run together."""
    graph, state = nnx.split(model)
    answers: list[list[int]] = [[] for _ in prompts]
    for chosen, size, length, room in _batches(prompts, limits, rows):
        prompt_BT, size_B = np.zeros((size, length), np.int32), np.ones(size, np.int32)
        for row, i in enumerate(chosen):
            prompt_BT[row, : len(prompts[i])] = prompts[i]
            size_B[row] = len(prompts[i])
        new = np.int32(max(limits[i] for i in chosen))
        done_BR = np.asarray(_generate(graph, state, prompt_BT, size_B, new, room, stop))
        for row, i in enumerate(chosen):
            answers[i] = [token for token in done_BR[row, : limits[i]].tolist() if token >= 0]
    return answers
