"""Matrices that compressed-tensors stores in the formats "nvfp4-pack-quantized" and
"mxfp4-pack-quantized": 4-bit floats.

`X.weight_packed` uint8 [N, K / 2] has the low half first; `X.weight_scale` [N, groups] is
float8_e4m3fn, or uint8 exponents biased by 127. With the former, `X.weight_global_scale` divides
the products of both. Devices without tensor cores for 4 bits compute with inputs as they are, so
`X.input_global_scale` is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.quantisation.fp4 import U8, Fp4Matrix
from jaxllm.quantisation.scheme import Header, PackedPart
from jaxllm.quantisation.weight_format import FP4, WeightFormat

PACKED = "weight_packed"
SCALE = "weight_scale"
WHOLE = "weight_global_scale"
INPUTS = "input_global_scale"
# columns that share a scale
NVFP4 = 16
MXFP4 = 32
SCALES = {NVFP4: ("F8_E4M3",), MXFP4: (U8, "F8_E8M0")}
ONE = ((1,), ())  # shapes of one number


@dataclass(frozen=True)
class Fp4Groups:
    """The scheme; `group` are the columns that share a scale."""

    group: int
    method = "compressed-tensors"

    @property
    def title(self) -> str:
        if self.group == NVFP4:
            return "nvfp4"
        return "mxfp4"

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        if len(shape) == 2:
            return WeightFormat(FP4, self.group)
        return None

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[Fp4Matrix]:
        for name, header in stored.items():
            if name.endswith(f".{PACKED}") and len(header.shape) == 2 and header.dtype == U8:
                module = name.removesuffix(PACKED)
                more = (WHOLE, INPUTS) if self.group == NVFP4 else ()
                names = (module + leaf for leaf in (PACKED, SCALE, *more))
                yield fp4_matrix(f"{module}weight", stored, tuple(names), self.group, "divided")


def fp4_matrix(
    name: str, stored: Mapping[str, Header], parts: tuple[str, ...], group: int, whole: str
) -> Fp4Matrix:
    """The matrix of the tensors `parts`: numbers, scales and, for NVFP4, the number of the whole
    matrix and of its inputs, which may be missing."""
    packed, scales, *numbers = parts
    rows, half = stored[packed].shape
    columns = 2 * stored[packed].shape[1]
    packed_parts = [
        PackedPart(packed, (rows, half), (U8,)),
        PackedPart(scales, (rows, -(-columns // group)), SCALES[group]),
    ]
    for index, number in enumerate(numbers):
        if number in stored or index == 0:
            shape: tuple[int, ...] = ONE[0]
            if number in stored and stored[number].shape in ONE:
                shape = stored[number].shape
            packed_parts.append(PackedPart(number, shape, ("F32",)))
    if not numbers:
        whole = ""
    return Fp4Matrix(name, (rows, columns), tuple(packed_parts), group, whole)


def read(groups: Mapping[str, Mapping[str, Any]]) -> Fp4Groups:
    """The scheme of these groups, by their places in the configuration. Raises ConfigError."""
    sizes = {where: _group(where, group["weights"]) for where, group in groups.items()}
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"{next(iter(groups))} and others have 4-bit floats of several sizes")
    return Fp4Groups(next(iter(sizes.values())))


def _group(where: str, weights: Mapping[str, Any]) -> int:
    size = weights.get("group_size")
    floats = weights.get("num_bits") == 4 and weights.get("type") == "float"
    if not floats or type(size) is not int or size not in SCALES:
        raise ConfigError(
            f"{where}.weights has {weights.get('num_bits')!r:.20} bits, type "
            f"{weights.get('type')!r:.20}, group_size {size!r:.20}; floats of 4 bits in groups of "
            f"{NVFP4} or {MXFP4} are read"
        )
    return size
