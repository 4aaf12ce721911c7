"""The gated activation of few tokens, which stays plain: the kernel of the product that reads it
rounds it as it loads it."""

from __future__ import annotations

from jax import Array

from pallas_kernels.gated_matmul.gating import Gating, computes
from pallas_kernels.parts import Product
from pallas_kernels.scaled_matmul import reference
from pallas_kernels.scaled_matmul.plan import is_faster
from pallas_kernels.scaled_matmul.rounding import Rounding
from pallas_kernels.target import Target


def prefers(target: Target, product: Product, rounding: Rounding, gating: Gating) -> bool:
    """For as many tokens as a kernel multiplies; for more, XLA does."""
    return computes(gating) and is_faster(product.shape[0], grouped=False)


def gated_rows(product: Product, rounding: Rounding, gating: Gating) -> Array:
    """See `pallas_kernels.scaled_matmul`."""
    return reference.gated(product, gating)
