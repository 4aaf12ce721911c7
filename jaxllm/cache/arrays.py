"""What all layers remember, on the device: the arrays of each cache group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxllm.cache.layer import AttentionCache
from jaxllm.cache.states import StateArrays
from jaxllm.mesh import LAYER, layer_devices
from pallas_kernels.quantised import SCALE_DTYPE, is_quantised

# [L·P, K, C, H]: every device holds all pages of its own heads
PAGES = PartitionSpec(None, LAYER, None, None)
# Writes to this page are dropped: it lies beyond every pool, whatever layer's first page is added
DROP_PAGE = 2**30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedArrays:
    """The pages of one cache group.

    Its P pages of each of its L layers lie in one array, one layer after another, since each array
    costs the host some microseconds a step. Heads are split over the devices of a layer. Page
    numbers are the group's own.

    Attributes:
        planes: Keys, then values `[L·P, K, C, H]`, each of its own width. Latent entries are keys
            without values.
        scales: The factors of 8-bit keys and values `[L·P, K, 2, C]`: per token and head one of the
            key and one of the value. Other types have none.
        layers: L.
    """

    planes: tuple[Array, ...]
    scales: tuple[Array, ...] = ()
    layers: int = field(default=1, metadata={"static": True})

    @staticmethod
    def abstract(
        spec: AttentionCache, layers: int, pages: int, page_size: int, dtype: DTypeLike, mesh: Mesh
    ) -> PagedArrays:
        """`pages` pages of `page_size` tokens of each layer, as ShapeDtypeStructs with shardings.

        Raises ValueError when heads do not divide over the devices.
        """
        shards = layer_devices(mesh)
        heads = spec.stored_heads(shards)
        if heads % shards:
            raise ValueError(
                f"{heads} KV heads cannot be split over {shards} devices; repeat them to a"
                f" multiple of {shards}"
            )
        place = NamedSharding(mesh, PAGES)
        rows = layers * pages
        planes = tuple(
            jax.ShapeDtypeStruct((rows, heads, page_size, width), jnp.dtype(dtype), sharding=place)
            for width in spec.plane_widths
        )
        scales = jax.ShapeDtypeStruct((rows, heads, 2, page_size), SCALE_DTYPE, sharding=place)
        return PagedArrays(planes, (scales,) if is_quantised(dtype) else (), layers)

    @property
    def num_pages(self) -> int:
        """P; 0 where no layer here belongs to the group."""
        return self.planes[0].shape[0] // max(1, self.layers)

    def first_page(self, index: int) -> int:
        """The row of the first page of a layer, which has this index among the L."""
        return index * self.num_pages

    def page_rows(self, page_N: Array) -> Array:
        """Rows of pages in the arrays, `[L, N]`; pages beyond the pool lie beyond the array.

        Rows are indices of the first axis. Scattering along another one makes XLA for GPUs change
        the layout of the whole array and back.
        """
        pages = self.num_pages
        beyond = jnp.where(page_N < pages, page_N, page_N + (self.layers - 1) * pages)
        return jnp.arange(self.layers, dtype=page_N.dtype)[:, None] * pages + beyond

    def map(self, function: Callable[[Array], Array]) -> PagedArrays:
        """The same pages with `function(array)` of every array."""
        planes = tuple(function(plane) for plane in self.planes)
        return replace(self, planes=planes, scales=tuple(map(function, self.scales)))


type GroupArrays = PagedArrays | StateArrays
# The arrays of all cache groups, those with pages first. Donated to and returned by every step
type KVCache = tuple[GroupArrays, ...]


def page_counts(kv: KVCache) -> tuple[int, ...]:
    """The pages of each cache group that has pages."""
    return tuple(arrays.num_pages for arrays in kv if isinstance(arrays, PagedArrays))


def page_bytes(spec: AttentionCache, shards: int, page_size: int, dtype: DTypeLike) -> int:
    """Bytes of one page of one layer on all devices together: what the layer keeps of `page_size`
    tokens, with its scales if `dtype` has 8 bits."""
    scale = SCALE_DTYPE.itemsize if is_quantised(dtype) else 0
    token = sum(width * jnp.dtype(dtype).itemsize + scale for width in spec.plane_widths)
    return spec.stored_heads(shards) * page_size * token


class Zeros:
    """Makes zeros of the shapes and shardings of a tree, on the devices by one program. Its
    programs live as long as it does: an engine that starts over compiles nothing."""

    def __init__(self) -> None:
        self._program = functools.cache(_zeros)

    def __call__[T](self, like: T) -> T:
        leaves, tree = jax.tree.flatten(like)
        program = self._program(tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves))
        return jax.tree.unflatten(tree, program())


def _zeros(leaves: tuple[tuple[tuple[int, ...], Any, Any], ...]) -> Callable[[], list[Array]]:
    """The program that makes them."""
    return jax.jit(
        lambda: [jnp.zeros(shape, dtype) for shape, dtype, _ in leaves],
        out_shardings=[sharding for *_, sharding in leaves],
    )
