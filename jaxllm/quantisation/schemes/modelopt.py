"""Matrices of 8-bit floats as NVIDIA's Model Optimizer writes them.

`X.weight` [N, K] is float8_e4m3fn. `X.weight_scale` is one number, and so is `X.input_scale`, the
scale of inputs, with the `quant_algo` FP8; it has one for each row with
FP8_PER_CHANNEL_PER_TOKEN, and one for each block of 128 × 128 with FP8_PB_WO. The weight is the
product of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.quantisation.matrix import Grid, ScaledMatrix, scaled_matrix
from jaxllm.quantisation.scheme import Header
from jaxllm.quantisation.weight_format import WeightFormat

E4M3 = "F8_E4M3"
BLOCK = 128
# Rows and columns that share a scale, 0 for all of them; and how inputs are rounded
ALGORITHMS = {
    "FP8": ((0, 0), "given"),
    "FP8_PER_CHANNEL_PER_TOKEN": ((1, 0), "token"),
    "FP8_PB_WO": ((BLOCK, BLOCK), "plain"),
}


@dataclass(frozen=True)
class ModelOpt:
    """The scheme; `algorithm` is one of ALGORITHMS."""

    algorithm: str
    method = "modelopt"

    @property
    def title(self) -> str:
        return f"modelopt {self.algorithm}"

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        return None

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[ScaledMatrix]:
        block, inputs = ALGORITHMS[self.algorithm]
        for name, found in stored.items():
            if found.dtype != E4M3 or len(found.shape) != 2 or not name.endswith(".weight"):
                continue
            owner = name.removesuffix("weight")
            rows, columns = (size or whole for size, whole in zip(block, found.shape, strict=True))
            given = f"{owner}input_scale" if inputs == "given" else None
            grid = Grid(rows, columns, inputs)
            yield scaled_matrix(name, stored, f"{owner}weight_scale", grid, given)


def read(settings: Mapping[str, Any]) -> ModelOpt:
    """The scheme of these settings. Raises ConfigError."""
    own = settings.get("quantization")  # of hf_quant_config.json
    algorithm = (own if isinstance(own, dict) else settings).get("quant_algo")
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"quant_algo is {algorithm!r:.80}; those that are read are {', '.join(ALGORITHMS)}"
        )
    return ModelOpt(algorithm)
