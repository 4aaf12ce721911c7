"""Matrices of 8-bit floats or integers in the groups of compressed-tensors.

`X.weight` [N, K] is float8_e4m3fn or int8; `X.weight_scale` has one scale for all, one for each row
[N, 1], for each group of columns [N, K / group_size], or for each block. The weight is the product
of both; of integers with `X.weight_zero_point`, that is taken from the numbers before. Inputs have
scales of their tokens, with or without zero points, of tokens and groups, or `X.input_scale`. In
the format "mxfp8-quantized" scales are uint8, exponents biased by 127.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.quantisation.byte_groups import byte_matrix
from jaxllm.quantisation.matrix import E4M3, NUMBERS, Grid, scaled_matrix
from jaxllm.quantisation.packed_groups import is_shuffled, read_inputs
from jaxllm.quantisation.scheme import Header, PackedTensor, modules
from jaxllm.quantisation.weight_format import WeightFormat

STRATEGIES = ("tensor", "channel", "group", "block")
INPUTS = {"tensor": "token", "token": "token", "group": "group"}  # of scales found at run time
SHIFTED = {"token": "shifted"}  # the same with zero points
TYPES = {"float": E4M3, "int": "I8"}
LINEAR = "Linear"  # a target that means all linear maps


@dataclass(frozen=True)
class Group:
    """What the configuration says of some modules.

    Attributes:
        targets: names of modules, "re:" and a pattern of such, or LINEAR.
        dtype: of the weights in files.
        block: rows and columns that share a scale; 0 for all of them.
        inputs: how inputs of the product are rounded, see `WeightFormat`.
        centred: the settings speak of no zero points of weights.
    """

    targets: tuple[str, ...]
    dtype: str
    block: tuple[int, int]
    inputs: str
    centred: bool

    @property
    def title(self) -> str:
        """What operators read of the weights."""
        return NUMBERS[self.dtype]

    def names(self, modules: tuple[str, ...]) -> bool:
        """Whether a target is one of a module's names, not LINEAR."""
        return any(_matches(target, module) for target in self.targets for module in modules)


@dataclass(frozen=True)
class FourBits(Group):
    """The same of integers of 4 bits, a byte each.

    Attributes:
        numbers: that inputs are rounded to; None: they stay as they are.
    """

    numbers: str | None = None

    @property
    def title(self) -> str:
        if self.numbers is None:
            return "int4"
        return f"int4, inputs in {self.numbers}"


@dataclass(frozen=True)
class ScaledGroups:
    """The scheme of these formats."""

    groups: tuple[Group, ...]
    method = "compressed-tensors"

    @property
    def title(self) -> str:
        return ", ".join(dict.fromkeys(group.title for group in self.groups))

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        return None

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[PackedTensor]:
        for name, header in stored.items():
            if not name.endswith(".weight") or len(header.shape) != 2:
                continue
            group = self._group(modules(stored, name))
            if header.dtype not in NUMBERS or group is None or header.dtype != group.dtype:
                continue
            if isinstance(group, FourBits):
                yield byte_matrix(name, stored, group.block[1], group.numbers, group.centred)
                continue
            rows, columns = (
                size or whole for size, whole in zip(group.block, header.shape, strict=True)
            )
            owner = name.removesuffix("weight")
            input_scale = None
            if group.inputs == "given":
                input_scale = f"{owner}input_scale"
            zero: str | None = f"{owner}weight_zero_point"
            if zero not in stored and group.centred:
                zero = None
            grid = Grid(rows, columns, group.inputs)
            yield scaled_matrix(
                name,
                stored,
                f"{owner}weight_scale",
                grid,
                input_scale,
                zero,
            )

    def _group(self, names: tuple[str, ...]) -> Group | None:
        """The group of a module: one that names it goes before one of all linear maps."""
        named = (group for group in self.groups if group.names(names))
        every = (group for group in self.groups if LINEAR in group.targets)
        return next(named, None) or next(every, None)


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return module == target or module.endswith(f".{target}")


def read(groups: Mapping[str, Mapping[str, Any]]) -> ScaledGroups:
    """The scheme of these groups, by their places in the configuration, whose targets are checked.
    Raises ConfigError."""
    return ScaledGroups(tuple(_group(where, group) for where, group in groups.items()))


def read_exponents(groups: Mapping[str, Mapping[str, Any]]) -> ScaledGroups:
    """The same of "mxfp8-quantized", whose scales are exponents. Devices without tensor cores for
    such compute with inputs as they are. Raises ConfigError."""
    return read({where: {**group, "input_activations": None} for where, group in groups.items()})


def _group(where: str, group: Mapping[str, Any]) -> Group:
    """One of `config_groups`. Raises ConfigError."""
    weights = group["weights"]
    targets = tuple(group["targets"])
    number_type = weights.get("type", "int")
    block = _block(where, weights)
    if is_shuffled(weights):
        raise ConfigError(
            f"actorder of {where} is {weights.get('actorder')!r:.20}; weights in bytes are read "
            "with groups in order: false, static or weight"
        )
    centred = number_type != "int" or weights.get("symmetric") is not False
    if (weights.get("num_bits"), number_type) == (4, "int") and block[0] == 1:
        numbers = read_inputs(where, group)
        return FourBits(targets, TYPES[number_type], block, "token", centred, numbers)
    if not isinstance(number_type, str) or number_type not in TYPES or weights.get("num_bits") != 8:
        raise ConfigError(
            f"{where} has weights of {weights.get('num_bits')!r:.20} bits, type "
            f"{number_type!r:.20}; 8 bits, {' or '.join(TYPES)}, are read, and integers of 4 with "
            "scales of rows or of groups"
        )
    inputs = _inputs(where, group.get("input_activations"), number_type)
    return Group(targets, TYPES[number_type], block, inputs, centred)


def check_targets(where: str, targets: Any) -> None:
    """Raises ConfigError unless these are names and legal patterns."""
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ConfigError(f"{where} must be a list of names")
    for target in (name for name in targets if name.startswith("re:")):
        try:
            re.compile(target.removeprefix("re:"))
        except re.error as error:
            raise ConfigError(f"{where} has no legal pattern: {error}") from None


def _block(where: str, weights: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale, 0 for all of them."""
    strategy = weights.get("strategy")
    size = weights.get("group_size")
    sizes = {
        "tensor": (0, 0),
        "channel": (1, 0),
        "group": (1, size),
        "block": weights.get("block_structure"),
    }
    block = sizes.get(strategy if isinstance(strategy, str) else "")
    if (
        isinstance(block, (list, tuple))
        and len(block) == 2
        and all(type(count) is int and count >= 0 for count in block)
        and (strategy in ("tensor", "channel") or all(block))
    ):
        return block[0], block[1]
    raise ConfigError(
        f"{where}.weights has the strategy {strategy!r:.40} with group_size {size!r:.20} and "
        f"block_structure {weights.get('block_structure')!r:.40}; one of {', '.join(STRATEGIES)} "
        "with positive sizes is expected"
    )


def _inputs(where: str, inputs: Any, number_type: str) -> str:
    """How inputs are rounded, from a group's input_activations."""
    if inputs is None:
        return "plain"
    if isinstance(inputs, dict):
        asked = inputs
    else:
        asked = {}
    strategy = asked.get("strategy", "tensor")
    same = asked.get("type", "int") == number_type
    rounding = _roundings(asked, number_type).get(strategy if isinstance(strategy, str) else "")
    if asked.get("num_bits") != 8 or not same or rounding is None:
        raise ConfigError(
            f"{where}.input_activations is {inputs!r:.160}; 8 bits of the weights' type are read, "
            "symmetric, dynamic for each token or group, or static for a tensor; integers with "
            "zero points, dynamic for each token"
        )
    return rounding


def _roundings(asked: Mapping[str, Any], number_type: str) -> Mapping[str, str]:
    """How inputs with these settings are rounded, by their strategy."""
    dynamic = asked.get("dynamic", False)
    symmetric = asked.get("symmetric", True)
    if symmetric is True:
        if dynamic is True:
            return INPUTS
        if dynamic is False:
            return {"tensor": "given"}
        return {}
    if dynamic is True and symmetric is False and number_type == "int":
        return SHIFTED
    return {}
