"""Matrices of 8-bit floats with a scale for each block of rows and columns, as DeepSeek-V3,
MiniMax-M2 and Qwen3-FP8 are published, or with one for all of a matrix.

`X.weight` [N, K] is stored as float8_e4m3fn. `X.weight_scale_inv` has the scale of each block,
[⌈N / rows⌉, ⌈K / columns⌉]; the last blocks may be cut off. Without a `weight_block_size` it is one
number, or `X.weight_scale` is. The weight is the product of both (transformers,
integrations/finegrained_fp8.py), whatever "inv" says. Inputs have scales of tokens and of as many
columns as a block; with the activation_scheme "static", `X.input_scale` or `X.activation_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.quantisation.matrix import E4M3, Grid, ScaledMatrix, matrices, scaled_matrix
from jaxllm.quantisation.scheme import Header
from jaxllm.quantisation.weight_format import WeightFormat

SCALES = ("weight_scale_inv", "weight_scale")
INPUT_SCALES = ("input_scale", "activation_scale")
ACTIVATIONS = ("dynamic", "static")


@dataclass(frozen=True)
class Fp8:
    """The scheme.

    Attributes:
        block: rows and columns of a block; None: all of a matrix.
        static: the checkpoint has scales of inputs.
    """

    block: tuple[int, int] | None
    static: bool = False
    method = "fp8"

    @property
    def title(self) -> str:
        if self.block is None:
            return "fp8 with a scale for each matrix"
        return f"fp8 in blocks of {self.block[0]} × {self.block[1]}"

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        return None

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[ScaledMatrix]:
        for name, shape in matrices(stored, E4M3):
            owner = name.removesuffix("weight")
            input_scale = None
            if self.static:
                input_scale = _named(owner, INPUT_SCALES, stored)
            inputs = "group"
            if self.block is None:
                inputs = "token"
            grid = Grid(*(self.block or shape), "given" if self.static else inputs)
            yield scaled_matrix(name, stored, _named(owner, SCALES, stored), grid, input_scale)


def _named(owner: str, leaves: tuple[str, ...], stored: Mapping[str, Header]) -> str:
    """The name that a tensor has of those that it may have."""
    return next((owner + leaf for leaf in leaves if owner + leaf in stored), owner + leaves[0])


def read(settings: Mapping[str, Any]) -> Fp8:
    """The scheme of these settings. Raises ConfigError."""
    activations = settings.get("activation_scheme", "dynamic")
    if activations not in ACTIVATIONS:
        raise ConfigError(
            f"activation_scheme is {activations!r:.80}; it must be one of {', '.join(ACTIVATIONS)}"
        )
    static = activations == "static"
    size = settings.get("weight_block_size")
    if size is None:
        return Fp8(None, static)
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(type(count) is int and count > 0 for count in size)
    ):
        raise ConfigError(
            f"weight_block_size is {size!r:.80}; two positive integers are expected, "
            "such as [128, 128], or null"
        )
    if static:
        raise ConfigError("activation_scheme is 'static'; with weight_block_size it is 'dynamic'")
    return Fp8((size[0], size[1]))
