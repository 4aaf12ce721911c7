"""Matrices of 8-bit or 4-bit floats as NVIDIA's Model Optimizer writes them.

`X.weight` [N, K] is float8_e4m3fn. `X.weight_scale` is one number, and so is `X.input_scale`, the
scale of inputs, with the `quant_algo` FP8; it has one for each row with
FP8_PER_CHANNEL_PER_TOKEN, and one for each block of 128 × 128 with FP8_PB_WO. The weight is the
product of both. With MXFP8 it is uint8 [N, K / 32], exponents biased by 127.

NVFP4 and W4A16_NVFP4: `X.weight` uint8 [N, K / 2] has the low half first, `X.weight_scale`
float8_e4m3fn [N, K / 16], and `X.weight_scale_2` is a factor of all.

Devices without tensor cores for groups of 16 or 32 columns compute NVFP4 and MXFP8 with inputs as
they are.

MIXED_PRECISION: `quantized_layers` has the `quant_algo` of each module, or of all within one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.quantisation.fp4 import U8
from jaxllm.quantisation.fp4_groups import NVFP4, fp4_matrix
from jaxllm.quantisation.matrix import E4M3, Grid, ScaledMatrix, scaled_matrix
from jaxllm.quantisation.scheme import Header, PackedTensor, Stored, modules
from jaxllm.quantisation.weight_format import FP4, WeightFormat

BLOCK = 128
MX_GROUP = 32
# Rows and columns that share a scale, 0 for all of them; and how inputs are rounded
ALGORITHMS = {
    "FP8": ((0, 0), "given"),
    "FP8_PER_CHANNEL_PER_TOKEN": ((1, 0), "token"),
    "FP8_PB_WO": ((BLOCK, BLOCK), "plain"),
    "MXFP8": ((1, MX_GROUP), "plain"),
}
FLOATS_OF_4_BITS = ("NVFP4", "W4A16_NVFP4")
MIXED = "MIXED_PRECISION"
KNOWN = (*ALGORITHMS, *FLOATS_OF_4_BITS)


@dataclass(frozen=True)
class ModelOpt:
    """The scheme.

    Attributes:
        algorithm: one of KNOWN, or MIXED.
        layers: with MIXED, the algorithm of each module.
    """

    algorithm: str
    layers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    method = "modelopt"

    @property
    def title(self) -> str:
        algorithms = sorted(set(self.layers.values()))
        title = f"modelopt {self.algorithm}"
        if algorithms:
            title += f" ({', '.join(algorithms)})"
        return title

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        floats = self.algorithm in FLOATS_OF_4_BITS and len(shape) == 2
        if floats:
            return WeightFormat(FP4, NVFP4)
        return None

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[PackedTensor]:
        for name, header in stored.items():
            if not name.endswith(".weight") or len(header.shape) != 2:
                continue
            if header.dtype not in (E4M3, U8):
                continue
            algorithm = self._algorithm(modules(stored, name))
            if algorithm is None and isinstance(stored, Stored):  # no random weights
                raise ConfigError(
                    f"{name} has few bits, but quantized_layers does not name the module: download "
                    "or convert the checkpoint again"
                )
            if algorithm in FLOATS_OF_4_BITS and header.dtype == U8:
                owner = name.removesuffix("weight")
                more = (owner + leaf for leaf in ("weight_scale", "weight_scale_2", "input_scale"))
                yield fp4_matrix(name, stored, (name, *more), NVFP4, "times")
            elif algorithm in ALGORITHMS and header.dtype == E4M3:
                yield _floats_of_8_bits(name, algorithm, stored)

    def _algorithm(self, names: tuple[str, ...]) -> str | None:
        """That of a module of these names, or of the nearest around it; None where the settings
        name neither."""
        if self.algorithm != MIXED:
            return self.algorithm
        while any(names):
            for name in names:
                if name in self.layers:
                    return self.layers[name]
            names = tuple(name.rpartition(".")[0] for name in names)
        return None


def _floats_of_8_bits(name: str, algorithm: str, stored: Mapping[str, Header]) -> ScaledMatrix:
    block, inputs = ALGORITHMS[algorithm]
    owner = name.removesuffix("weight")
    shape = stored[name].shape
    rows, columns = (size or whole for size, whole in zip(block, shape, strict=True))
    input_scale = None
    if inputs == "given":
        input_scale = f"{owner}input_scale"
    return scaled_matrix(
        name, stored, f"{owner}weight_scale", Grid(rows, columns, inputs), input_scale
    )


def read(settings: Mapping[str, Any]) -> ModelOpt:
    """The scheme of these settings. Raises ConfigError."""
    nested = settings.get("quantization")  # of hf_quant_config.json
    fields = nested if isinstance(nested, dict) else settings
    algorithm = fields.get("quant_algo")
    if algorithm == MIXED:
        return ModelOpt(MIXED, _layers(fields.get("quantized_layers")))
    return ModelOpt(_known("quant_algo", algorithm))


def _layers(layers: Any) -> dict[str, str]:
    if not isinstance(layers, dict) or not layers:
        raise ConfigError(
            f"quantized_layers is {layers!r:.80}; with {MIXED} it must be an object with the "
            "quant_algo of each module"
        )
    return {
        name: _known(
            f"quant_algo of {name!s:.80}", of.get("quant_algo") if isinstance(of, dict) else of
        )
        for name, of in layers.items()
    }


def _known(where: str, algorithm: Any) -> str:
    if algorithm not in KNOWN:
        raise ConfigError(
            f"{where} is {algorithm!r:.80}; those that are read are {', '.join(KNOWN)}"
        )
    return str(algorithm)
