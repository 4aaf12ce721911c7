"""How the experts of a mixture lie on the devices of an engine."""

from __future__ import annotations

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.models.config.spec import ModelSpec

UNIT = 64  # columns of an expert that a product's kernel takes at once


def expert_groups(config: EngineConfig, spec: ModelSpec) -> int:
    """Groups of the engine's devices that have experts of their own.

    Without a wish every device has a share of the width of each expert, so that all read as many
    bytes whatever tokens choose; there are groups where kernels would not take so narrow a share.
    Raises ConfigError.
    """
    devices = config.tensor_parallel_size
    asked = config.expert_parallel_size
    if config.enable_expert_parallel:
        asked = devices
    if asked is None:
        return _usual(spec, devices)
    if spec.mixture is None:
        raise ConfigError(
            "--enable-expert-parallel and --expert-parallel-size are for mixtures of experts, and "
            f"this {spec.model_type} model has none; leave them out"
        )
    if devices % asked:
        raise ConfigError(
            f"--expert-parallel-size {asked} does not divide --tensor-parallel-size {devices}; "
            "choose one that does"
        )
    if asked > spec.mixture.experts:
        most = _divisors(devices, spec.mixture.experts)[-1]
        raise ConfigError(
            f"{spec.mixture.experts} experts do not divide into {asked} groups; set "
            f"--expert-parallel-size {most}, without --enable-expert-parallel"
        )
    return asked


def _usual(spec: ModelSpec, devices: int) -> int:
    if spec.mixture is None:
        return 1
    sizes = _divisors(devices, spec.mixture.experts)
    if spec.formats:  # whose kernels take whole experts
        return sizes[-1]
    even = (n for n in sizes if spec.mixture.inner % (devices // n * UNIT) == 0)
    return next(even, sizes[-1])


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]
