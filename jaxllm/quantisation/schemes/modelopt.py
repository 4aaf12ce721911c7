"""Matrices of 8-bit or 4-bit floats as NVIDIA's Model Optimizer writes them.

`X.weight` [N, K] is float8_e4m3fn. `X.weight_scale` is one number, and so is `X.input_scale`, the
scale of inputs, with the `quant_algo` FP8; it has one for each row with
FP8_PER_CHANNEL_PER_TOKEN, and one for each block of 128 × 128 with FP8_PB_WO. The weight is the
product of both.

NVFP4 and W4A16_NVFP4: `X.weight` uint8 [N, K / 2] has the low half first, `X.weight_scale`
float8_e4m3fn [N, K / 16], and `X.weight_scale_2` is a factor of all. Inputs stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.quantisation.fp4 import U8
from jaxllm.quantisation.fp4_groups import NVFP4, fp4_matrix
from jaxllm.quantisation.matrix import Grid, scaled_matrix
from jaxllm.quantisation.scheme import Header, PackedTensor
from jaxllm.quantisation.weight_format import FP4, WeightFormat

E4M3 = "F8_E4M3"
BLOCK = 128
# Rows and columns that share a scale, 0 for all of them; and how inputs are rounded
ALGORITHMS = {
    "FP8": ((0, 0), "given"),
    "FP8_PER_CHANNEL_PER_TOKEN": ((1, 0), "token"),
    "FP8_PB_WO": ((BLOCK, BLOCK), "plain"),
}
FLOATS_OF_4_BITS = ("NVFP4", "W4A16_NVFP4")


@dataclass(frozen=True)
class ModelOpt:
    """The scheme; `algorithm` is one of ALGORITHMS or FLOATS_OF_4_BITS."""

    algorithm: str
    method = "modelopt"

    @property
    def title(self) -> str:
        return f"modelopt {self.algorithm}"

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        floats = self.algorithm in FLOATS_OF_4_BITS and len(shape) == 2
        return WeightFormat(FP4, NVFP4) if floats else None

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[PackedTensor]:
        if self.algorithm in FLOATS_OF_4_BITS:
            yield from _floats_of_4_bits(stored)
            return
        block, inputs = ALGORITHMS[self.algorithm]
        for name, found in stored.items():
            if found.dtype != E4M3 or len(found.shape) != 2 or not name.endswith(".weight"):
                continue
            owner = name.removesuffix("weight")
            rows, columns = (size or whole for size, whole in zip(block, found.shape, strict=True))
            given = f"{owner}input_scale" if inputs == "given" else None
            grid = Grid(rows, columns, inputs)
            yield scaled_matrix(name, stored, f"{owner}weight_scale", grid, given)


def _floats_of_4_bits(stored: Mapping[str, Header]) -> Iterator[PackedTensor]:
    for name, found in stored.items():
        if name.endswith(".weight") and found.dtype == U8 and len(found.shape) == 2:
            owner = name.removesuffix("weight")
            more = (f"{owner}{leaf}" for leaf in ("weight_scale", "weight_scale_2", "input_scale"))
            yield fp4_matrix(name, stored, (name, *more), NVFP4, "times")


def read(settings: Mapping[str, Any]) -> ModelOpt:
    """The scheme of these settings. Raises ConfigError."""
    own = settings.get("quantization")  # of hf_quant_config.json
    algorithm = (own if isinstance(own, dict) else settings).get("quant_algo")
    known = (*ALGORITHMS, *FLOATS_OF_4_BITS)
    if algorithm not in known:
        raise ConfigError(
            f"quant_algo is {algorithm!r:.80}; those that are read are {', '.join(known)}"
        )
    return ModelOpt(algorithm)
