"""Greedy decoding of many prompts at once, by running the whole text again for every token: slow, simple, and independent of the engine."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples.demo_model.network import can_fuse, forward


@partial(jax.jit, static_argnames=("stop",))
def _extend(
    graph: nnx.GraphDef, state: nnx.State, token_BT: jax.Array, size_B: jax.Array, new: jax.Array, stop: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """`token_BT` with up to `new` greedy tokens written after each row's first `size_B`, and the new sizes; a row ends after a token of `stop`."""
    model = nnx.merge(graph, state)
    rows, length = token_BT.shape
    position_BT = jnp.broadcast_to(jnp.arange(length), (rows, length))

    def more(carry: tuple[jax.Array, ...]) -> jax.Array:
        step, _, _, alive_B = carry
        return (step < new) & alive_B.any()

    def body(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        step, token_BT, size_B, alive_B = carry
        hidden_BTD = forward(model, token_BT, position_BT, None, can_fuse(model.embed.weight.dtype))
        last_BD = hidden_BTD[jnp.arange(rows), size_B - 1]
        next_B = model.logits(last_BD).argmax(-1).astype(token_BT.dtype)
        alive_B = alive_B & (size_B < length)
        written_BT = token_BT.at[jnp.arange(rows), jnp.minimum(size_B, length - 1)].set(next_B)
        token_BT = jnp.where(alive_B[:, None], written_BT, token_BT)
        stopped_B = (next_B[:, None] == jnp.array(stop)).any(1)
        return step + 1, token_BT, size_B + alive_B, alive_B & ~stopped_B

    return jax.lax.while_loop(more, body, (jnp.int32(0), token_BT, size_B, jnp.ones(rows, bool)))[1:3]


def greedy(model: nnx.Module, prompts: list[list[int]], limits: list[int], stop: tuple[int, ...], rows: int = 256) -> list[list[int]]:
    """The greedy continuation of each prompt, stop token included, at most its limit of tokens (rounded up to 32 or more); `rows` run together."""
    graph, state = nnx.split(model)
    order = sorted(range(len(prompts)), key=lambda i: (-(-limits[i] // 32), len(prompts[i])))  # like lengths together: little padding
    answers: list[list[int]] = [[] for _ in prompts]
    for begin in range(0, len(order), rows):
        chosen = order[begin : begin + rows]
        new = max(limits[i] for i in chosen)
        length = -(-(max(len(prompts[i]) for i in chosen) + new) // 128) * 128  # few lengths, few compilations
        token_BT = np.zeros((min(rows, len(order)), length), np.int32)
        size_B = np.ones(len(token_BT), np.int32)
        for row, i in enumerate(chosen):
            token_BT[row, : len(prompts[i])] = prompts[i]
            size_B[row] = len(prompts[i])
        done_BT, end_B = map(np.asarray, _extend(graph, state, jnp.array(token_BT), jnp.array(size_B), jnp.int32(new), stop))
        for row, i in enumerate(chosen):
            answers[i] = done_BT[row, size_B[row] : end_B[row]].tolist()
    return answers
