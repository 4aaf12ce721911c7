"""Plain weights that become numbers of few bits on the devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxllm.nn.rules import Rule
from jaxllm.weights.loader import Loader

COMPILING = 4  # threads


def filled_by(rule: Rule, names: Iterable[str]) -> list[str]:
    """The names among the parameters' `names` that the rule fills."""
    if rule.rounded is None:
        return [rule.parameter]
    return [name for name in names if name.startswith(f"{rule.parameter}.")]


class Rounding:
    """Makes parameters of what their rules' pieces fill. Weights are rounded one at a time, so that
    devices hold no more than one of them as plain numbers.

    Parameters that are written part by part lie in arrays that are made together, before the first
    plain weight. Made one by one they would lie where plain weights have been, and an allocator
    that gives away such a hole whole loses what is too much.

    Args:
        likes: the model's parameters.
        dtype: of plain weights.
        loader: has the programs.
        before: parameters that are overwritten, by name.

    Attributes:
        loader: the same.
    """

    def __init__(
        self,
        likes: Mapping[str, jax.ShapeDtypeStruct],
        dtype: DTypeLike,
        loader: Loader,
        before: Mapping[str, jax.Array] | None = None,
    ):
        self._likes = likes
        self._dtype = dtype
        self.loader = loader
        self._room = dict(before or {})

    def like(self, rule: Rule) -> jax.ShapeDtypeStruct:
        """What the pieces of a rule fill: its parameter, the plain weight, or the bytes of rows."""
        if rule.rounded is None:
            return self._likes[rule.parameter]
        weight_format, shape, _ = rule.rounded
        values = self._likes[f"{rule.parameter}.values"]
        split = values.sharding
        if len(values.shape) != len(shape):
            split = NamedSharding(split.mesh, PartitionSpec())
        dtype = self._dtype if weight_format.rounded else np.uint8
        return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

    def take_room(self, names: Iterable[str]) -> None:
        """Make the arrays that these parameters are written into; those of before serve again, and
        all others of before are let go."""
        before = self._room
        likes = {name: self._likes[name] for name in names}
        missing = {like for name, like in likes.items() if name not in before}
        with ThreadPoolExecutor(COMPILING, thread_name_prefix="zeros") as pool:
            list(pool.map(self.loader.zeros, missing))
        self._room = {
            name: before[name] if name in before else self.loader.zeros(like)()
            for name, like in likes.items()
        }
        jax.block_until_ready(self._room)

    def room(self, rule: Rule) -> jax.Array:
        """An array for what the pieces of a rule fill. It holds anything."""
        if rule.rounded is None:
            return self._room.pop(rule.parameter)
        return self.loader.zeros(self.like(rule))()

    def finished(self, rule: Rule, plain: jax.Array) -> dict[str, jax.Array]:
        """The parameters of a rule, of what its pieces fill; a plain weight is freed."""
        if rule.rounded is None:
            return {rule.parameter: plain}
        names = {name.rpartition(".")[2]: name for name in filled_by(rule, self._likes)}
        likes = tuple((leaf, self._likes[name]) for leaf, name in names.items())
        room = {leaf: self._room.pop(name) for leaf, name in names.items()}
        made = self.loader.rounding(rule.rounded, likes)(plain, room)
        jax.block_until_ready(made)
        plain.delete()
        return {name: made[leaf] for leaf, name in names.items()}
