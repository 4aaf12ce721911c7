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


def held(weight_format: WeightFormat, shape: Shape) -> Held | Reordered:
    """An empty weight of this format."""
    if weight_format.ordered:
        return SCHEMES[weight_format.numbers](weight_format, shape)
    axes = (*shape.axes[: len(shape.out)], None)
    inner = replace(shape, inp=(shape.columns,), axes=axes, order=())
    return Reordered(
        SCHEMES[weight_format.numbers](replace(weight_format, ordered=True), inner), shape
    )


def backend(weight_format: WeightFormat, target: Target) -> str:
    """The back end of products with such weights on a target."""
    return SCHEMES[weight_format.numbers].backend(weight_format, target)


def has_kernel(weight_format: WeightFormat, target: Target) -> bool:
    """Whether a target has a kernel of products with such weights; else plain JAX unpacks them."""
    scheme = SCHEMES[weight_format.numbers]
    return scheme.is_kernel(scheme.backend(weight_format, target))


def workspace(kinds: Iterable[WeightFormat], stream: int, product: int) -> int:
    """The largest `Held.workspace` of these formats; 0 where there are none."""
    widths = (
        SCHEMES[weight_format.numbers].workspace(weight_format, stream, product)
        for weight_format in kinds
    )
    return max(widths, default=0)


def rounded(weight_format: WeightFormat, plain: Array) -> dict[str, Array]:
    """The parameters, by their names, of a weight of plain numbers `[*out, K]`."""
    return SCHEMES[weight_format.numbers].rounded(weight_format, plain)
