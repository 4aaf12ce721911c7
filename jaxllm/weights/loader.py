"""What several loads share."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxllm.nn.rules import Rounded
from jaxllm.nn.weight.schemes import rounded
from jaxllm.weights.staging import BufferPool, compile_writer, compile_zeros


class Loader:
    """Buffers in pinned memory and compiled programs that serve all loads of one engine: its start,
    and later ones of other weights of the same shapes, which then compile nothing. They are let go
    with it. Safe to use from many threads.

    Attributes:
        buffers: through which weights reach the devices.
        writer: from a parameter's shape to the program that writes chunks of it, see
            `compile_writer`.
        zeros: from a parameter's shape to the program that makes its array.
        rounding: from a plain weight's rounding to the program for it, see `compile_rounding`.
    """

    def __init__(self) -> None:
        self.buffers = BufferPool()
        self.writer = functools.cache(compile_writer)
        self.zeros = functools.cache(compile_zeros)
        self.rounding = functools.cache(compile_rounding)


def compile_rounding(
    rounding: Rounded, likes: tuple[tuple[str, jax.ShapeDtypeStruct], ...]
) -> Callable[[jax.Array, dict[str, jax.Array]], dict[str, jax.Array]]:
    """The program (plain weight, arrays) → the parameters of these names and shapes, written into
    the arrays."""
    round_plain = functools.partial(rounded, rounding.format)

    def program(plain: jax.Array, room: dict[str, jax.Array]) -> dict[str, jax.Array]:
        made = jax.lax.map(round_plain, plain) if rounding.experts else round_plain(plain)
        written = {}
        for name, like in likes:
            whole = jnp.broadcast_to(made[name].astype(like.dtype), like.shape)
            # A use of the array, without which the program would not take it, nor write into it
            written[name] = jax.lax.dynamic_update_slice(room[name], whole, (0,) * whole.ndim)
        return written

    return jax.jit(
        program,
        out_shardings={name: like.sharding for name, like in likes},
        donate_argnames="room",
    )
