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

    Args:
        likes: the model's parameters.
        dtype: of plain weights.
    """

    def __init__(self, likes: Mapping[str, jax.ShapeDtypeStruct], dtype: DTypeLike):
        self._likes, self._dtype = likes, dtype
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
        names = filled_by(rule, self._likes)
        likes = tuple((name.rpartition(".")[2], self._likes[name]) for name in names)
        made = self._programs(rule.rounded, likes)(plain)
        jax.block_until_ready(made)
        plain.delete()
        return {name: made[name.rpartition(".")[2]] for name in names}

    @staticmethod
    def _program(
        given: Rounded, likes: tuple[tuple[str, jax.ShapeDtypeStruct], ...]
    ) -> Callable[[jax.Array], dict[str, jax.Array]]:
        one = functools.partial(rounded, given.kind)

        def program(plain: jax.Array) -> dict[str, jax.Array]:
            made = jax.lax.map(one, plain) if given.experts else one(plain)
            return {
                name: jnp.broadcast_to(made[name].astype(like.dtype), like.shape)
                for name, like in likes
            }

        return jax.jit(program, out_shardings={name: like.sharding for name, like in likes})
