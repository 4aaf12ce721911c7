"""The context in which attention writes and reads what layers remember."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.cache import latent
from jaxllm.cache.arrays import KVCache, PagedArrays
from jaxllm.cache.collective import ALONE, Collective
from jaxllm.cache.groups import Place
from jaxllm.cache.row_kernels import RowKernels
from jaxllm.cache.states import Cell, StateArrays, StateInputs, scan_step
from jaxllm.cache.step import PagedInputs, Plans, StaticOptions
from pallas_kernels import paged_decode, paged_extend, rope_write
from pallas_kernels.backends import close_plan, open_plan
from pallas_kernels.latent_decode import LatentRows
from pallas_kernels.rope_write import HeadRows
from pallas_kernels.target import PORTABLE, Target


class PlanKey(NamedTuple):
    """What layers have in common that share a plan.

    Attributes:
        group: their cache group, and with it inputs, KV heads and widths.
        window: tokens that a token sees.
        heads: query heads.
    """

    group: int
    window: int | None
    heads: int


class PagedContext(RowKernels):
    """The attention context of one traced step on one device, over the device's own heads. Holds
    the cache as it is written layer by layer; read `kv` at the end.

    Args:
        places: Where the cache of each layer lies.
        inputs: The inputs of each cache group, `StateInputs` of those with states.
        prompt_length_T: int32, prompt length of each token's request, for RoPE scalings that depend
            on it.
        no_split: No row is split between thread blocks, so a row does not depend on others.
        backend: Of attention.
        target: For which the other kernels are chosen.
    """

    def __init__(
        self,
        kv: KVCache,
        places: Sequence[Place],
        inputs: Sequence[PagedInputs | StateInputs],
        backend: str,
        collective: Collective = ALONE,
        prompt_length_T: Array | None = None,
        no_split: bool = False,
        target: Target = PORTABLE,
    ):
        super().__init__(target, collective)
        self.prompt_length_T = prompt_length_T
        self._backend = backend
        self._arrays = list(kv)
        self._places = places
        self._inputs = inputs
        self._no_split = no_split
        self._plans: dict[PlanKey, Plans] = {}

    @property
    def kv(self) -> KVCache:
        """The cache with everything written so far."""
        return tuple(self._arrays)

    def attend(
        self,
        layer: int,
        rows: HeadRows,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        """Write the step's keys and values, if there are some, into the layer's pages, then attend;
        returns `o_TNH`."""
        static = StaticOptions(self._backend, scale, self._no_split, window, softcap)
        group, index = self._place(layer)
        arrays, inputs = self._paged(group)
        key = PlanKey(group, window, rows.queries)
        if key not in self._plans:
            self._plans[key] = _plan(static, inputs, arrays.planes[0], rows)
        plans = self._plans[key]
        first_page = _first_page(arrays, index)
        return self._kept(
            key, _write_and_attend(static, rows, arrays, inputs, plans, first_page, sinks)
        )

    def attend_latent(self, layer: int, rows: LatentRows, *, scale: float) -> Array:
        """Write the step's entries into the layer's pages, then attend; returns `o_TNF`."""
        static = StaticOptions(self._backend, scale, self._no_split)
        group, index = self._place(layer)
        arrays, inputs = self._paged(group)
        key = PlanKey(group, None, rows.q_TNH.shape[1])
        if key not in self._plans:
            self._plans[key] = latent.plan(static, inputs, arrays.planes[0], rows)
        plans = self._plans[key]
        first_page = _first_page(arrays, index)
        return self._kept(
            key, latent.write_and_attend(static, rows, arrays, inputs, plans, first_page)
        )

    def scan(self, layer: int, cell: Cell, rows: Any) -> Any:
        """What `cell` gives for the tokens, whose states change in the layer's slots."""
        group, index = self._place(layer)
        arrays = self._arrays[group]
        inputs = self._inputs[group]
        assert isinstance(arrays, StateArrays) and isinstance(inputs, StateInputs)
        output, self._arrays[group] = scan_step(arrays, index, cell, rows, inputs)
        return output

    def _paged(self, group: int) -> tuple[PagedArrays, PagedInputs]:
        """The pages of a group as they are now, and its inputs."""
        arrays = self._arrays[group]
        inputs = self._inputs[group]
        assert isinstance(arrays, PagedArrays) and isinstance(inputs, PagedInputs)
        return arrays, inputs

    def _place(self, layer: int) -> tuple[int, int]:
        """The group of a layer, and its index there."""
        place = self._places[layer]
        return place.group, place.index

    def _kept(self, key: PlanKey, outcome: tuple[Array, PagedArrays, Plans]) -> Array:
        """The output of a layer, whose pages and plans are kept for the next one."""
        output, self._arrays[key.group], plans = outcome
        # Nothing reads the last layer's plans. Dropped as dead code, they would make it a function
        # of its own, lowered again.
        output, self._plans[key] = lax.optimization_barrier((output, plans))
        return output


def _first_page(arrays: PagedArrays, index: int) -> Array:
    return jnp.full((1,), arrays.first_page(index), jnp.int32)


def _plan(static: StaticOptions, inputs: PagedInputs, pages: Array, rows: HeadRows) -> Plans:
    """One plan for all layers with the same `PlanKey`."""
    _, kv_heads, _, head_dim = pages.shape
    B = inputs.decode_lengths_B.shape[0]
    tokens = rows.qkv.shape[0]
    local = {
        "heads": rows.queries,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "window": static.window,
        "no_split": static.no_split,
    }
    plan_decode = paged_decode.BACKENDS.planner(static.backend)
    plan_extend = paged_extend.BACKENDS.planner(static.backend)
    decode = extend = None
    if B and plan_decode is not None:
        decode = plan_decode(inputs.decode_lengths_B, itemsize=pages.dtype.itemsize, **local)
    if tokens > B and plan_extend is not None:
        extend = plan_extend(*inputs.chunks, tokens=tokens - B, **local)
    return Plans(decode, extend)


# One inner jit: a model's layers are unrolled, and without it every layer would trace and lower the
# kernels again.
@functools.partial(jax.jit, static_argnums=0)
def _write_and_attend(
    static: StaticOptions,
    rows: HeadRows,
    arrays: PagedArrays,
    inputs: PagedInputs,
    plans: Plans,
    first_page: Array,
    sinks: Array | None,
) -> tuple[Array, PagedArrays, Plans]:
    """Also returns the plans as the kernels leave them, for the next layer."""
    plans = Plans(*map(open_plan, plans))
    q_TNH, arrays = _written(static, rows.of_one_shard, arrays, inputs, first_page)
    k_pages, v_pages = arrays.planes
    options: dict[str, Any] = {
        "backend": static.backend,
        "scale": static.scale,
        "window": static.window,
        "softcap": static.softcap,
        "first_page": first_page,
        "no_split": static.no_split,
        "scales": arrays.scales[0] if arrays.scales else None,
        "sinks": sinks,
    }
    o_TNH = _attend(q_TNH, (k_pages, v_pages), inputs, plans, options)
    return o_TNH, arrays, Plans(*map(close_plan, plans))


def _written(
    static: StaticOptions,
    rows: HeadRows,
    arrays: PagedArrays,
    inputs: PagedInputs,
    first_page: Array,
) -> tuple[Array, PagedArrays]:
    """Queries `[T, N, H]`, and the pages with the rows' keys and values, if they have some."""
    if not rows.keys:
        return rope_write.rotated(rows)[0], arrays
    k_pages, v_pages = arrays.planes
    q_TNH, k_pages, v_pages, *scales = rope_write.rope_write(
        rows,
        k_pages,
        v_pages,
        inputs.write_page_T,
        inputs.write_offset_T,
        first_page,
        scales=arrays.scales[0] if arrays.scales else None,
        backend=rope_write.beside(static.backend),
    )
    return q_TNH, replace(arrays, planes=(k_pages, v_pages), scales=tuple(scales))


def _attend(
    q_TNH: Array,
    pages: tuple[Array, Array],
    inputs: PagedInputs,
    plans: Plans,
    options: dict[str, Any],
) -> Array:
    """Attention of the rows that decode, then of the chunks; `options` are those of both ops."""
    B = inputs.decode_lengths_B.shape[0]
    T = q_TNH.shape[0]
    decode = paged_decode.decode_attention
    extend = paged_extend.extend_attention
    parts = []
    if B:
        table = (inputs.decode_tables_BM, inputs.decode_lengths_B)
        parts.append(decode(q_TNH[:B], *pages, *table, **options, plan=plans.decode))
    if T > B:
        places = (inputs.chunk_tables_RM, *inputs.chunks)
        parts.append(extend(q_TNH[B:], *pages, *places, **options, plan=plans.extend))
    if len(parts) == 1:
        return parts[0]
    return jnp.concatenate(parts)
