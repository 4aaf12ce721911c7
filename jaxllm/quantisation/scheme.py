"""What a scheme says of the tensors that it packs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.quantisation.weight_format import WeightFormat
from jaxllm.tensors import Bounds

# Types of scales, as safetensors calls them
FLOATS = ("F32", "BF16", "F16", "F8_E8M0")


class Header(Protocol):
    """What is known of a stored tensor before it is read; types are named as in safetensors."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def same(name: str) -> tuple[str, ...]:
    """A name alone."""
    return (name,)


class Stored(dict[str, Header]):
    """Headers by name, of tensors whose values can be read: some formats have shapes there.

    `spellings` gives all names that settings may have for a tensor's.
    """

    def __init__(
        self,
        headers: Mapping[str, Header],
        read: Callable[[str], np.ndarray],
        spellings: Callable[[str], tuple[str, ...]] = same,
    ):
        super().__init__(headers)
        self.read = read
        self.spellings = spellings


def modules(stored: Mapping[str, Header], name: str) -> tuple[str, ...]:
    """What settings may call the module of a tensor."""
    if isinstance(stored, Stored):
        spelled = stored.spellings(name)
    else:
        spelled = (name,)
    return tuple(spelling.rpartition(".")[0] for spelling in spelled)


@dataclass(frozen=True)
class PackedPart:
    """One of the stored tensors that a packed tensor consists of.

    Attributes:
        name: in the checkpoint.
        shape: that it must have.
        dtypes: of which it must have one.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class PackedTensor(ABC):
    """A tensor that a checkpoint stores in parts.

    Attributes:
        name: of the plain tensor.
        shape: of the plain tensor.
        parts: the stored tensors, in the order in which `unpack` gets them.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[PackedPart, ...]

    @property
    def format(self) -> WeightFormat | None:
        """The format in which a linear map can hold the tensor, as `leaves`; None where it is held
        in plain numbers alone."""
        return None

    def leaves(self) -> tuple[PackedTensor, ...]:
        """The tensors, each named `name` and a suffix, of which the format's parameters are made;
        what they unpack to is of the parameter's type."""
        return ()

    def check(self, arrays: Sequence[np.ndarray]) -> None:
        """Raises ConfigError where a scale, or anything else that is small, has a value that cannot
        be; other values are seen when they are unpacked."""
        return None

    @abstractmethod
    def unpack(self, arrays: Sequence[np.ndarray], bounds: Bounds) -> np.ndarray:
        """The values within `bounds`, of which alone it reads the `arrays`; those of plain tensors
        are float32. Raises ConfigError for values that cannot be weights."""

    def checked_whole(self, arrays: Sequence[np.ndarray]) -> None:
        """Raises ConfigError where `unpack` would."""
        self.unpack(arrays, tuple((0, size) for size in self.shape))


class Scheme(Protocol):
    """A way to store weights."""

    @property
    def method(self) -> str:
        """The name that `--quantization` and configurations have for the scheme."""

    @property
    def title(self) -> str:
        """The scheme in words, for operators."""

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[PackedTensor]:
        """The packed tensors among the `stored` ones, with the shapes that they should have."""

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        """The format in which a plain tensor of this shape is held, for random weights; None where
        types and names of stored tensors say it, or where such tensors are plain."""


def check_scales(part: PackedPart, scales: np.ndarray) -> None:
    """Raises ConfigError for a scale that is negative, infinite or not a number. Zero is the scale
    of a block of zeros."""
    wrong = scales[~(np.isfinite(scales) & (scales >= 0))]
    if wrong.size:
        raise ConfigError(
            f"{part.name} has the scale {wrong.flat[0]}; "
            "scales are finite and at least 0: download or convert the checkpoint again"
        )
