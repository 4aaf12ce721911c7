"""The arrays that stay on the device between programs."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from jaxllm.cache.kv import KVCache, zeros_of
from jaxllm.engine.runtime.program import KV, STATE, WEIGHTS, Resident
from jaxllm.engine.runtime.shapes import StepShapes
from jaxllm.engine.runtime.state import SlotState


class DeviceArrays:
    """Weights, KV pages, slot state and what programs leave for each other. An array is zero until
    a program gives it.

    After a forward, `logits` of its number of rows are the forward's; after `process_logits` they
    are the processed ones.
    """

    def __init__(self, shapes: StepShapes, weights: tuple[Array, ...], kv: KVCache):
        self._shapes = shapes
        zeros = SlotState.zeros(shapes.slots, shapes.table_width)
        state = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), zeros, shapes.state)
        self._arrays: dict[tuple[str, int], Any] = {}
        for at, value in ((WEIGHTS, weights), (KV, kv), (STATE, state)):
            self.write(at, value)

    def read(self, at: Resident) -> Any:
        """An array, or a tree of them."""
        name, rows, field = at
        found = self._arrays.get((name, rows))
        if found is None:
            found = self._arrays[name, rows] = zeros_of(Resident(name, rows).shapes(self._shapes))
        return getattr(found, field) if field else found

    def write(self, at: Resident, value: Any) -> None:
        """Replace an array, or one field of a tree."""
        name, rows, field = at
        if field:
            value = self._arrays[name, rows]._replace(**{field: value})
        self._arrays[name, rows] = value
        if name == "forward_output":
            self._arrays["logits", rows] = value.logits
        elif name == "processed_logits":
            self._arrays["logits", rows] = value

    def delete(self) -> None:
        """Free everything except the weights."""
        for (name, _), tree in self._arrays.items():
            for array in jax.tree.leaves(tree) if name != WEIGHTS.name else ():
                array.delete()
        self._arrays = {}
