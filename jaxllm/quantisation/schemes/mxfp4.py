"""Experts in 4-bit floats, 32 of which share an exponent, as gpt-oss is published (OCP
Microscaling Formats 1.0, MXFP4).

`X_blocks` [E, out, in / 32, 16] has two numbers a byte, the low half first; `X_scales`
[E, out, in / 32] has the exponents, biased by 127. The plain tensor X is [E, in, out], as
transformers makes it (integrations/mxfp4.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.quantisation.fp4 import U8, VALUES, check_exponents, powers, with_scales
from jaxllm.quantisation.int4_rows import row_bytes
from jaxllm.quantisation.scheme import Bounds, Header, PackedPart, PackedTensor
from jaxllm.quantisation.weight_format import FP4, WeightFormat

BLOCK = 32  # numbers


@dataclass(frozen=True)
class Mxfp4Experts(PackedTensor):
    """A tensor [E, in, out]."""

    @property
    def format(self) -> WeightFormat | None:
        return WeightFormat(FP4, BLOCK)

    def leaves(self) -> tuple[PackedTensor, ...]:
        experts, inp, out = self.shape
        shape = (experts, out, row_bytes(WeightFormat(FP4, BLOCK), inp))
        return (Mxfp4Rows(f"{self.name}.rows", shape, self.parts),)

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        check_exponents(self.parts[1], arrays[1])

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        blocks, exponents = arrays
        expert, (first, last), out = bounds
        begin = first // BLOCK
        end = -(-last // BLOCK)
        index = (slice(*expert), slice(*out), slice(begin, end))
        scales = powers(self.parts[1], exponents[index])
        scaled = VALUES[blocks[index]].view(np.float32) * scales[..., None]
        rows = scaled.reshape(*scaled.shape[:2], -1)
        return rows[..., first - begin * BLOCK : last - begin * BLOCK].swapaxes(1, 2)


@dataclass(frozen=True)
class Mxfp4Rows(PackedTensor):
    """The same as the bytes of its rows [E, out, bytes], see `int4_rows`."""

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        check_exponents(self.parts[1], arrays[1])

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        blocks, exponents = arrays
        index = tuple(slice(*bound) for bound in bounds[:2])
        stored = blocks[index]
        scales = powers(self.parts[1], exponents[index])
        experts, out = stored.shape[:2]
        rows = with_scales(stored.reshape(experts * out, -1), scales.reshape(experts * out, -1))
        return rows.reshape(experts, out, -1)[..., slice(*bounds[2])]


@dataclass(frozen=True)
class Mxfp4:
    """The scheme."""

    title = method = "mxfp4"

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        if len(shape) == 3:
            return WeightFormat(FP4, BLOCK)
        return None

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[Mxfp4Experts]:
        for name, header in stored.items():
            if not name.endswith("_blocks") or len(header.shape) != 4:
                continue
            plain = name.removesuffix("_blocks")
            experts, out, blocks, _ = header.shape
            parts = (
                PackedPart(name, (experts, out, blocks, BLOCK // 2), (U8,)),
                PackedPart(f"{plain}_scales", (experts, out, blocks), (U8,)),
            )
            yield Mxfp4Experts(plain, (experts, blocks * BLOCK, out), parts)


def read(settings: Mapping[str, Any]) -> Mxfp4:
    """The scheme, which has no settings."""
    return Mxfp4()
