"""Matrices of 8-bit floats with a scale for each row, as Meta publishes Llama 3.1 for FBGEMM.

`X.weight` [N, K] is stored as float8_e4m3fn, `X.weight_scale` is [N, 1], and the weight is the
product of both. Inputs have scales of tokens. What lies beyond `activation_scale_ub` counts as that
bound, so a few large entries of a token do not cost the others their precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.quantisation.matrix import E4M3, Grid, ScaledMatrix, matrices, scaled_matrix
from jaxllm.quantisation.scheme import Header
from jaxllm.quantisation.weight_format import WeightFormat

BOUND = "activation_scale_ub"
USUAL_BOUND = 1200.0  # transformers', where the settings have none
LARGEST_BOUND = 1e30  # what float32 and bfloat16 hold


@dataclass(frozen=True)
class FbgemmFp8:
    """The scheme.

    Attributes:
        bound: the largest magnitude that inputs keep.
    """

    bound: float
    method = "fbgemm_fp8"

    @property
    def title(self) -> str:
        return f"fbgemm_fp8 with a scale for each row, inputs up to {self.bound:g}"

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        return None

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[ScaledMatrix]:
        for name, (_, columns) in matrices(stored, E4M3):
            grid = Grid(1, columns, "token", self.bound)
            yield scaled_matrix(name, stored, f"{name}_scale", grid)


def read(settings: Mapping[str, Any]) -> FbgemmFp8:
    """The scheme of these settings. Raises ConfigError."""
    bound = settings.get(BOUND, USUAL_BOUND)
    if type(bound) not in (int, float) or not 0 < bound < LARGEST_BOUND:
        raise ConfigError(f"{BOUND} is {bound!r:.80}; it must be a positive number, such as 1200.0")
    return FbgemmFp8(float(bound))
