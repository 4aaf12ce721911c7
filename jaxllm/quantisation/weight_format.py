"""What the weight of a linear map is held in on devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

FP8, INT8 = "fp8", "int8"


@dataclass(frozen=True)
class WeightFormat:
    """Numbers of few bits and their scales.

    Attributes:
        numbers: the type, FP8 (float8_e4m3fn) or INT8.
        group: columns of a row that share a scale; None: all of them.
        inputs: how inputs of the product are rounded, see `pallas_kernels.scaled_matmul`.
        rounded: the checkpoint holds plain numbers, which are rounded while they are loaded.
    """

    numbers: str
    group: int | None = None
    inputs: str = "plain"
    rounded: bool = False

    @property
    def title(self) -> str:
        """What operators read."""
        scales = "rows" if self.group is None else f"{self.group} columns"
        inputs = {
            "plain": "inputs as they are",
            "token": "inputs with scales of tokens",
            "group": f"inputs with scales of tokens and {self.group} columns",
            "given": "inputs with the checkpoint's scale",
        }
        return f"{self.numbers} with scales of {scales}, {inputs[self.inputs]}"


# What `--quantization` makes of plain weights while they are loaded
ONLINE: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "fp8": WeightFormat(FP8, inputs="token", rounded=True),
        "fp8_w8a16": WeightFormat(FP8, rounded=True),
        "int8": WeightFormat(INT8, inputs="token", rounded=True),
        "int8_w8a16": WeightFormat(INT8, rounded=True),
    }
)
