"""The schemes of weights that are held in few bits, by the type of their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from jax import Array

from jaxllm.nn.weight.int4 import Int4
from jaxllm.nn.weight.protocol import Held, Shape
from jaxllm.nn.weight.reordered import Reordered
from jaxllm.nn.weight.scaled import Scaled
from jaxllm.quantisation import WeightFormat
from pallas_kernels.target import Target

SCHEMES: Mapping[str, type[Held]] = MappingProxyType(
    {"fp8": Scaled, "int8": Scaled, "int4": Int4, "fp4": Int4, "nf4": Int4, "iq4": Int4}
)


def held(kind: WeightFormat, shape: Shape) -> Held | Reordered:
    """An empty weight of this format."""
    if kind.ordered:
        return SCHEMES[kind.numbers](kind, shape)
    axes = (*shape.axes[: len(shape.out)], None)
    inner = replace(shape, inp=(shape.columns,), axes=axes, order=())
    return Reordered(SCHEMES[kind.numbers](replace(kind, ordered=True), inner), shape)


def backend(kind: WeightFormat, target: Target) -> str:
    """The back end of products with such weights on a target."""
    return SCHEMES[kind.numbers].backend(kind, target)


def has_kernel(kind: WeightFormat, target: Target) -> bool:
    """Whether a target has a kernel of products with such weights; else plain JAX unpacks them."""
    scheme = SCHEMES[kind.numbers]
    return scheme.is_kernel(scheme.backend(kind, target))


def workspace(kinds: Iterable[WeightFormat], stream: int, product: int) -> int:
    """The most that `Held.workspace` says of these formats; 0 of none."""
    widths = (SCHEMES[kind.numbers].workspace(kind, stream, product) for kind in kinds)
    return max(widths, default=0)


def rounded(kind: WeightFormat, plain: Array) -> dict[str, Array]:
    """The parameters, by their names, of a weight of plain numbers `[*out, K]`."""
    return SCHEMES[kind.numbers].rounded(kind, plain)
