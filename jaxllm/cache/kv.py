"""Keys and values on the device: the pages of all layers, and the context in which attention writes
and reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxllm.cache import latent
from jaxllm.cache.collective import ALONE, Collective
from jaxllm.cache.row_kernels import RowKernels
from jaxllm.cache.step import PagedInputs as PagedInputs
from jaxllm.cache.step import Plans, StaticOptions
from jaxllm.mesh import LAYER, layer_devices
from pallas_kernels import paged_decode, paged_extend, rope_write
from pallas_kernels.backends import close_plan, open_plan
from pallas_kernels.latent_decode import LatentRows
from pallas_kernels.quantised import SCALE_DTYPE, is_quantised
from pallas_kernels.rope_write import HeadRows
from pallas_kernels.target import PORTABLE, Target

# [L·P, K, C, H]: every device holds all pages of its own heads
PAGES = PartitionSpec(None, LAYER, None, None)
# Writes to this page are dropped: it lies beyond every pool, whatever layer's first page is added
DROP_PAGE = 2**30


def zeros_of[T](like: T) -> T:
    """Zeros of a tree's shapes and shardings, made on the devices by one program."""
    leaves, tree = jax.tree.flatten(like)
    return jax.tree.unflatten(
        tree, _zeros(tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))()
    )


@functools.lru_cache(maxsize=64)
def _zeros(leaves: tuple[tuple[tuple[int, ...], Any, Any], ...]) -> Callable[[], list[Array]]:
    """The program that makes them; kept, so that an engine that starts over compiles nothing."""
    return jax.jit(
        lambda: [jnp.zeros(shape, dtype) for shape, dtype, _ in leaves],
        out_shardings=[sharding for *_, sharding in leaves],
    )


def page_bytes(
    layers: int,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    dtype: DTypeLike,
    pools: int = 2,
) -> int:
    """Bytes of one page on all devices together: keys and values of `page_size` tokens in every
    layer, and their scales if `dtype` has 8 bits; keys alone where there is one pool."""
    scale = SCALE_DTYPE.itemsize if is_quantised(dtype) else 0
    return pools * layers * kv_heads * page_size * (head_dim * jnp.dtype(dtype).itemsize + scale)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The pools of all cache groups. Donated to and returned by every step.

    A group's P pages of each of its L layers lie in one array, one layer after another, since each
    array costs the host some microseconds a step. Heads are split over the devices of a layer. Page
    numbers are a group's own.

    Attributes:
        k, v: Per group, keys and values `[L·P, K, C, H]`. Latent entries are keys without values.
        scales: Per group, the factors of 8-bit keys and values `[L·P, K, 2, C]`: per token and head
            one of the key and one of the value. Other types have none.
        groups: The group of each layer.
    """

    k: tuple[Array, ...]
    v: tuple[Array, ...]
    scales: tuple[Array, ...] = ()
    groups: tuple[int, ...] = field(default=(), metadata={"static": True})

    @staticmethod
    def join(pools: Sequence[KVCache], groups: tuple[int, ...]) -> KVCache:
        """The pools of several groups as one; layer i is the next layer of pool `groups[i]`."""
        k, v, scales = (
            sum(leaves, ())
            for leaves in zip(*((pool.k, pool.v, pool.scales) for pool in pools), strict=True)
        )
        return KVCache(k, v, scales, groups)

    @property
    def num_pages(self) -> tuple[int, ...]:
        """P of each group; 0 of one that no layer here belongs to."""
        return tuple(
            leaf.shape[0] // max(1, self.groups.count(group)) for group, leaf in enumerate(self.k)
        )

    def first_page(self, layer: int) -> int:
        """The row of a layer's first page in the arrays of its group."""
        group = self.groups[layer]
        return self.groups[:layer].count(group) * self.num_pages[group]

    def page_rows(self, group: int, page_N: Array) -> Array:
        """Rows of pages in the arrays of a group, `[L, N]`; pages beyond the pool lie beyond the
        array.

        Rows are indices of the first axis. Scattering along another one makes XLA for GPUs change
        the layout of the whole array and back.
        """
        pages, layers = self.num_pages[group], self.groups.count(group)
        beyond = jnp.where(page_N < pages, page_N, page_N + (layers - 1) * pages)
        return jnp.arange(layers, dtype=page_N.dtype)[:, None] * pages + beyond

    def map_arrays(self, function: Callable[[int, Array], Array]) -> KVCache:
        """The cache with `function(group, array)` of every array."""
        k, v, scales = (
            tuple(function(group, array) for group, array in enumerate(arrays))
            for arrays in (self.k, self.v, self.scales)
        )
        return KVCache(k, v, scales, self.groups)

    def group_arrays(self, group: int) -> tuple[Array, ...]:
        """One group's keys and, if there are any, values and scales."""
        own = slice(group, group + 1)
        return self.k[group], *self.v[own], *self.scales[own]

    @staticmethod
    def abstract(
        layers: int,
        num_pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: DTypeLike,
        mesh: Mesh,
        pools: int = 2,
    ) -> KVCache:
        """The pool of one group as ShapeDtypeStructs with shardings, without values where `pools`
        is 1. Raises ValueError unless `kv_heads` is a multiple of these devices (repeat heads
        first)."""
        shards = layer_devices(mesh)
        if kv_heads % shards:
            raise ValueError(
                f"{kv_heads} KV heads cannot be split over {shards} devices; repeat them to a"
                f" multiple of {shards}"
            )
        place = NamedSharding(mesh, PAGES)
        pages = jax.ShapeDtypeStruct(
            (layers * num_pages, kv_heads, page_size, head_dim), jnp.dtype(dtype), sharding=place
        )
        scales = jax.ShapeDtypeStruct(
            (layers * num_pages, kv_heads, 2, page_size), SCALE_DTYPE, sharding=place
        )
        values = (pages,) * (pools - 1)
        return KVCache((pages,), values, (scales,) if is_quantised(dtype) else (), (0,) * layers)


class PagedContext(RowKernels):
    """The attention context of one traced step on one device, over the device's own heads. Holds
    the cache as it is written layer by layer; read `kv` at the end.

    Args:
        inputs: The inputs of each cache group.
        prompt_length_T: int32, prompt length of each token's request, for RoPE scalings that depend
            on it.
        no_split: No row is split between thread blocks, so a row does not depend on others.
        backend: Of attention.
        target: For which the other kernels are chosen.
    """

    def __init__(
        self,
        kv: KVCache,
        inputs: Sequence[PagedInputs],
        backend: str,
        collective: Collective = ALONE,
        prompt_length_T: Array | None = None,
        no_split: bool = False,
        target: Target = PORTABLE,
    ):
        super().__init__(target, collective)
        self.prompt_length_T = prompt_length_T
        self._backend = backend
        self._given, self._inputs = kv, inputs
        self._pools = [kv.group_arrays(group) for group in range(len(kv.k))]
        self._no_split = no_split
        self._plans: dict[int | None, Plans] = {}

    @property
    def kv(self) -> KVCache:
        """The cache with everything written so far."""
        k, v, scales = (tuple(pool[i] for pool in self._pools if i < len(pool)) for i in range(3))
        return KVCache(k, v, scales, self._given.groups)

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
        """Write the step's keys and values into the layer's pages, then attend; returns `o_TNH`."""
        static = StaticOptions(self._backend, scale, self._no_split, window, softcap)
        inputs, pages = self._of(layer)
        if window not in self._plans:
            self._plans[window] = _plan(static, inputs, pages[0], rows)
        places = (pages, inputs, self._plans[window], self._first_page(layer))
        return self._kept(layer, window, _write_and_attend(static, rows, *places, sinks))

    def attend_latent(self, layer: int, rows: LatentRows, *, scale: float) -> Array:
        """Write the step's entries into the layer's pages, then attend; returns `o_TNF`."""
        static = StaticOptions(self._backend, scale, self._no_split)
        inputs, pages = self._of(layer)
        if None not in self._plans:
            self._plans[None] = latent.plan(static, inputs, pages[0], rows)
        places = (pages, inputs, self._plans[None], self._first_page(layer))
        return self._kept(layer, None, latent.write_and_attend(static, rows, *places))

    def _of(self, layer: int) -> tuple[PagedInputs, tuple[Array, ...]]:
        """The inputs of a layer's group, and its pages as they are now."""
        group = self._given.groups[layer]
        return self._inputs[group], self._pools[group]

    def _first_page(self, layer: int) -> Array:
        return jnp.full((1,), self._given.first_page(layer), jnp.int32)

    def _kept(
        self, layer: int, window: int | None, found: tuple[Array, tuple[Array, ...], Plans]
    ) -> Array:
        """The output of a layer, whose pages and plans are kept for the next one."""
        output, self._pools[self._given.groups[layer]], plans = found
        # Nothing reads the last layer's plans. Dropped as dead code, they would make it a function
        # of its own, lowered again.
        output, self._plans[window] = lax.optimization_barrier((output, plans))
        return output


def _plan(static: StaticOptions, inputs: PagedInputs, pages: Array, rows: HeadRows) -> Plans:
    """One plan for all layers of a window."""
    _, kv_heads, _, head_dim = pages.shape
    B, tokens = inputs.decode_lengths_B.shape[0], rows.qkv.shape[0]
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
    pages: tuple[Array, ...],
    inputs: PagedInputs,
    plans: Plans,
    first_page: Array,
    sinks: Array | None,
) -> tuple[Array, tuple[Array, ...], Plans]:
    """Also returns the plans as the kernels leave them, for the next layer."""
    plans = Plans(*map(open_plan, plans))
    k_pages, v_pages, *scales = pages
    q_TNH, *written = rope_write.rope_write(
        rows.of_one_shard,
        k_pages,
        v_pages,
        inputs.write_page_T,
        inputs.write_offset_T,
        first_page,
        scales=scales[0] if scales else None,
        backend=rope_write.beside(static.backend),
    )
    k_pages, v_pages, *scales = written
    options: dict[str, Any] = {
        "backend": static.backend,
        "scale": static.scale,
        "window": static.window,
        "softcap": static.softcap,
        "first_page": first_page,
        "no_split": static.no_split,
        "scales": scales[0] if scales else None,
        "sinks": sinks,
    }
    o_TNH = _attend(q_TNH, (k_pages, v_pages), inputs, plans, options)
    return o_TNH, tuple(written), Plans(*map(close_plan, plans))


def _attend(
    q_TNH: Array,
    pages: tuple[Array, Array],
    inputs: PagedInputs,
    plans: Plans,
    options: dict[str, Any],
) -> Array:
    """Attention of the rows that decode, then of the chunks; `options` are those of both ops."""
    B, T = inputs.decode_lengths_B.shape[0], q_TNH.shape[0]
    decode, extend = paged_decode.decode_attention, paged_extend.extend_attention
    parts = []
    if B:
        table = (inputs.decode_tables_BM, inputs.decode_lengths_B)
        parts.append(decode(q_TNH[:B], *pages, *table, **options, plan=plans.decode))
    if T > B:
        places = (inputs.chunk_tables_RM, *inputs.chunks)
        parts.append(extend(q_TNH[B:], *pages, *places, **options, plan=plans.extend))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
