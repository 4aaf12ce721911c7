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

from jaxllm.config import ConfigError
from jaxllm.quantisation.scheme import Bounds, Header, PackedPart, PackedTensor

BLOCK = 32  # numbers
U8 = "U8"
BIAS = 127
LARGEST = 252  # exponent with which 6 is a finite float32; 255 is not a number
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_HALVES = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)], np.float32)
_PAIRS = np.stack([np.tile(_HALVES, 16), np.repeat(_HALVES, 16)], axis=1)
# Both numbers of each byte as one element: a look-up of rows takes many times as long
VALUES = _PAIRS.view(np.complex64)[:, 0]


@dataclass(frozen=True)
class Mxfp4Experts(PackedTensor):
    """A tensor [E, in, out]."""

    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        (blocks, exponents), (expert, (first, last), out) = arrays, bounds
        begin, end = first // BLOCK, -(-last // BLOCK)
        index = (slice(*expert), slice(*out), slice(begin, end))
        exponent = exponents[index]
        if exponent.max(initial=0) > LARGEST:
            raise ConfigError(
                f"{self.parts[1].name} has the exponent {exponent.max()}; exponents of weights are "
                f"at most {LARGEST}: download or convert the checkpoint again"
            )
        values = VALUES[blocks[index]].view(np.float32)
        scaled = np.ldexp(values, exponent.astype(np.int32)[..., None] - BIAS)
        rows = scaled.reshape(*scaled.shape[:2], -1)
        return rows[..., first - begin * BLOCK : last - begin * BLOCK].swapaxes(1, 2)


@dataclass(frozen=True)
class Mxfp4:
    """The scheme."""

    title = method = "mxfp4"

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[Mxfp4Experts]:
        for name, found in stored.items():
            if not name.endswith("_blocks") or len(found.shape) != 4:
                continue
            plain, (experts, out, blocks, _) = name.removesuffix("_blocks"), found.shape
            parts = (
                PackedPart(name, (experts, out, blocks, BLOCK // 2), (U8,)),
                PackedPart(f"{plain}_scales", (experts, out, blocks), (U8,)),
            )
            yield Mxfp4Experts(plain, (experts, blocks * BLOCK, out), parts)


def read(settings: Mapping[str, Any]) -> Mxfp4:
    """The scheme, which has no settings."""
    return Mxfp4()
