"""What the weight of a linear map is held in on devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

FP8 = "fp8"
INT8 = "int8"
INT4 = "int4"
FP4 = "fp4"
NF4 = "nf4"
IQ4 = "iq4"
SYMMETRIC = "symmetric"
ZEROS = "zeros"
OFFSETS = "offsets"
FLOAT32 = "float32"
FLOAT16 = "float16"


@dataclass(frozen=True)
class WeightFormat:
    """Numbers of few bits and their scales.

    Attributes:
        numbers: the type, FP8 (float8_e4m3fn), INT8, or one of 4 bits (see
            `pallas_kernels.int4_matmul`): INT4 (0 to 15), FP4 (e2m1), NF4 (quantiles), or IQ4
            (the steps of GGUF's IQ4).
        group: columns of a row that share a scale; None: all of them.
        inputs: how inputs of the product are rounded, see `pallas_kernels.scaled_matmul`.
        form: SYMMETRIC, or groups of INT4 have ZEROS (zero points), or those of INT4, or of INT8
            with plain inputs, OFFSETS (that are added).
        rounded: the checkpoint holds plain numbers, which are rounded while they are loaded.
        ordered: groups follow each other along a row; else columns are put into the order of their
            groups, and inputs with them.
        scales: their type beside numbers of 8 bits where the model computes in 16. FLOAT16 is for
            those that are integers times numbers of that type: none is too small for it.
        bound: inputs of larger magnitude count as this before they are rounded; None: as they are.
        input_numbers: the type, of 8 bits, that inputs are rounded to; None: that of the numbers.
        input_scale: of the inputs, where parts of a fused map have unlike ones, which keeps these
            apart; None: it is read with the weights.
    """

    numbers: str
    group: int | None = None
    inputs: str = "plain"
    form: str = SYMMETRIC
    rounded: bool = False
    ordered: bool = True
    scales: str = FLOAT32
    bound: float | None = None
    input_numbers: str | None = None
    input_scale: float | None = None

    @property
    def title(self) -> str:
        """What operators read."""
        scales = "rows"
        if self.group is not None:
            scales = f"{self.group} columns"
        inputs = {
            "plain": "inputs as they are",
            "token": "inputs with scales of tokens",
            "group": f"inputs with scales of tokens and {self.group} columns",
            "given": "inputs with the checkpoint's scale",
            "shifted": "inputs with scales and zero points of tokens",
        }
        group_numbers = {
            SYMMETRIC: "scales",
            ZEROS: "scales and zero points",
            OFFSETS: "scales and offsets",
        }
        order = " in an order of their own"
        if self.ordered:
            order = ""
        bound = ""
        if self.bound is not None:
            bound = f" up to {self.bound:g}"
        of = ""
        if self.input_numbers is not None:
            of = f" in {self.input_numbers}"
        input_words = inputs[self.inputs].replace("inputs", f"inputs{of}")
        weights = f"{self.numbers} with {group_numbers[self.form]} of {scales}{order}"
        return f"{weights}, {input_words}{bound}"


# What `--quantization` makes of plain weights while they are loaded
ONLINE: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "fp8": WeightFormat(FP8, inputs="token", rounded=True),
        "fp8_w8a16": WeightFormat(FP8, rounded=True),
        "int8": WeightFormat(INT8, inputs="token", rounded=True),
        "int8_w8a16": WeightFormat(INT8, rounded=True),
        "int4": WeightFormat(INT4, 128, form=ZEROS, rounded=True),
    }
)
