"""What a device offers to kernels, as a value that needs no device, and what kernels need of it. No
jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# Features of NVIDIA GPUs by the first compute capability that has them; later ones have them too
SINCE: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"cp_async": (8, 0), "mma": (8, 0), "fp8": (8, 9), "tma": (9, 0)}
)
# Features that GPUs of one generation alone have, by the capability's major number
GENERATION: Mapping[str, int] = MappingProxyType({"wgmma": 9, "tcgen05": 10})


@dataclass(frozen=True)
class Target:
    """A kind of device, for which back ends are chosen. The default has only what runs everywhere.

    Attributes:
        platform: JAX's name, "cpu", "gpu" or "tpu" say.
        capability: The compute capability of an NVIDIA GPU, "9.0" say; "" elsewhere.
        processors: Multiprocessors that a kernel of this process has to itself; 0: not known.
        shared_memory: Bytes of shared memory that a thread block may ask for; 0: not known.
        features: What its kernels may use, by the names in `SINCE` and `GENERATION`, sorted.
    """

    platform: str = "cpu"
    capability: str = ""
    processors: int = 0
    shared_memory: int = 0
    features: tuple[str, ...] = ()

    @classmethod
    def gpu(cls, capability: str, processors: int = 0, shared_memory: int = 0) -> Target:
        """An NVIDIA GPU with the features of its compute capability."""
        return cls("gpu", capability, processors, shared_memory, features_of(capability))

    @classmethod
    def of(cls, device: Any) -> Target:
        """The target that a JAX device is. All its processors count, whoever else uses them."""
        capability = getattr(device, "compute_capability", None)
        if not capability:
            return cls(device.platform)
        processors = getattr(device, "core_count", None)
        memory = getattr(device, "shared_memory_per_block_optin", None)
        return cls.gpu(str(capability), processors or 0, memory or 0)

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Target:
        """The target whose `dataclasses.asdict` this is, also after it was JSON."""
        return cls(**{**values, "features": tuple(values["features"])})

    @property
    def title(self) -> str:
        """The kind of device, for a person."""
        if self.capability:
            return f"compute capability {self.capability}"
        if self.platform in ("cpu", "tpu"):
            return self.platform.upper()
        return self.platform


def features_of(capability: str) -> tuple[str, ...]:
    """The features of a compute capability, sorted."""
    major, minor = (int(number) for number in capability.split("."))
    features = [name for name, first in SINCE.items() if (major, minor) >= first]
    features += [name for name, generation in GENERATION.items() if generation == major]
    return tuple(sorted(features))


@dataclass(frozen=True)
class Needs:
    """What a back end needs of a target; the default is nothing.

    Attributes:
        title: The device that has it, for a person: "a TPU" say. "" where nothing is needed.
        platforms: One of these; () = any.
        capabilities: One of these compute capabilities; () = any.
        features: All of these.
        shared_memory: Bytes of shared memory of a thread block, at least.
    """

    title: str = ""
    platforms: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    shared_memory: int = 0

    def met_by(self, target: Target) -> bool:
        """Whether the target has all of it."""
        return (
            (not self.platforms or target.platform in self.platforms)
            and (not self.capabilities or target.capability in self.capabilities)
            and set(self.features) <= set(target.features)
            and self.shared_memory <= target.shared_memory
        )


PORTABLE = Target()
ANYWHERE = Needs()
HOPPER = Needs("an NVIDIA GPU of compute capability 9.0 (Hopper)", capabilities=("9.0",))
TPU = Needs("a TPU", platforms=("tpu",))
