"""Plain weights that become numbers of few bits on the devices."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxllm.nn.rules import Rounded, Rule
from jaxllm.nn.weight.schemes import rounded

type Index = tuple[slice, ...]


def filled_by(rule: Rule, names: Iterable[str]) -> list[str]:
    """Those of the parameters' `names` that the rule fills."""
    if rule.rounded is None:
        return [rule.parameter]
    return [name for name in names if name.startswith(f"{rule.parameter}.")]


class Rounding:
    """Rounds the weights of one model, one at a time, so that devices hold no more than one of them
    as plain numbers.

    Rounded parameters are written into arrays that are made together, before the first plain
    weight. Made one by one they would lie where plain weights have been, and an allocator that
    gives away such a hole whole loses what is too much.

    Args:
        likes: the model's parameters.
        dtype: of plain weights.
    """

    def __init__(self, likes: Mapping[str, jax.ShapeDtypeStruct], dtype: DTypeLike):
        self._likes, self._dtype = likes, dtype
        self._room: dict[str, jax.Array] = {}
        self._turn = threading.Lock()
        self._programs = functools.cache(self._program)

    def like(self, rule: Rule) -> jax.ShapeDtypeStruct:
        """What the pieces of a rule fill: its parameter, the plain weight, or the bytes of rows."""
        if rule.rounded is None:
            return self._likes[rule.parameter]
        (kind, shape, _), values = rule.rounded, self._likes[f"{rule.parameter}.values"]
        split = values.sharding
        if len(values.shape) != len(shape):
            split = NamedSharding(split.mesh, PartitionSpec())
        dtype = self._dtype if kind.rounded else np.uint8
        return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

    def take_room(self, rules: Iterable[Rule]) -> None:
        """Make the arrays that the rounded parameters of these rules are written into."""
        names = [name for rule in rules if rule.rounded for name in filled_by(rule, self._likes)]
        likes = {name: self._likes[name] for name in names}

        def empty() -> dict[str, jax.Array]:
            return {name: jnp.zeros(like.shape, like.dtype) for name, like in likes.items()}

        places = {name: like.sharding for name, like in likes.items()}
        self._room = jax.block_until_ready(jax.jit(empty, out_shardings=places)())

    def placed(self, rule: Rule, blocks: Mapping[Index, np.ndarray]) -> dict[str, jax.Array]:
        """The parameters of a rule, of the plain weight's blocks on the host."""
        like = self.like(rule)
        with self._turn:
            plain = jax.make_array_from_callback(like.shape, like.sharding, blocks.__getitem__)
            return self.finished(rule, plain)

    def finished(self, rule: Rule, plain: jax.Array) -> dict[str, jax.Array]:
        """The parameters of a rule, of what its pieces fill; a plain weight is freed."""
        if rule.rounded is None:
            return {rule.parameter: plain}
        names = {name.rpartition(".")[2]: name for name in filled_by(rule, self._likes)}
        likes = tuple((own, self._likes[name]) for own, name in names.items())
        room = {own: self._room.pop(name) for own, name in names.items()}
        made = self._programs(rule.rounded, likes)(plain, room)
        jax.block_until_ready(made)
        plain.delete()
        return {name: made[own] for own, name in names.items()}

    @staticmethod
    def _program(
        given: Rounded, likes: tuple[tuple[str, jax.ShapeDtypeStruct], ...]
    ) -> Callable[[jax.Array, dict[str, jax.Array]], dict[str, jax.Array]]:
        one = functools.partial(rounded, given.kind)

        def program(plain: jax.Array, room: dict[str, jax.Array]) -> dict[str, jax.Array]:
            made = jax.lax.map(one, plain) if given.experts else one(plain)
            return {
                name: jnp.broadcast_to(made[name].astype(like.dtype), like.shape)
                for name, like in likes
            }

        return jax.jit(
            program,
            out_shardings={name: like.sharding for name, like in likes},
            donate_argnames="room",
            keep_unused=True,
        )
