"""RoPE settings of a configuration → angles. Frequencies are computed in float32, as transformers
does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.models.config.read import positive, rope_parameters
from jaxllm.nn.rope import DynamicRope, Rope, StaticRope


def rope(hf: Mapping[str, Any], dim: int) -> Rope:
    """The rotary embedding of a complete configuration. Raises ConfigError for an unknown type or a
    missing or illegal setting."""
    settings = rope_parameters(hf)
    kind = settings["rope_type"]
    if kind not in _KINDS:
        raise ConfigError(
            f"config.json: RoPE type {kind!r} is not supported (supported: {', '.join(_KINDS)})"
        )
    for source in (settings, hf):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ConfigError(
                f"config.json: partial_rotary_factor {source['partial_rotary_factor']!r} is not supported; it must be 1"
            )
    return _KINDS[kind](settings, hf, dim)


def _default(settings: dict[str, Any], hf: Mapping[str, Any], dim: int) -> Rope:
    return _static(_inv_freq(settings, dim))


def _linear(settings: dict[str, Any], hf: Mapping[str, Any], dim: int) -> Rope:
    return _static(_inv_freq(settings, dim) / np.float32(_number(settings, "factor")))


def _dynamic(settings: dict[str, Any], hf: Mapping[str, Any], dim: int) -> Rope:
    if dim < 4:
        raise ConfigError(
            f"config.json: dynamic RoPE scaling needs a head_dim of at least 4, not {dim}"
        )
    return DynamicRope(
        _number(settings, "rope_theta"),
        dim,
        _number(settings, "factor"),
        positive(hf, "max_position_embeddings"),
    )


def _llama3(settings: dict[str, Any], hf: Mapping[str, Any], dim: int) -> Rope:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    inv_freq = _inv_freq(settings, dim)
    factor = _number(settings, "factor")
    low, high = _number(settings, "low_freq_factor"), _number(settings, "high_freq_factor")
    if high <= low:
        raise ConfigError(
            f"config.json: high_freq_factor {high} must be larger than low_freq_factor {low}"
        )
    original = _original_length(settings, hf)
    wavelength = 2 * math.pi / inv_freq
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return _static((1 - smooth) * inv_freq / factor + smooth * inv_freq)


def _yarn(settings: dict[str, Any], hf: Mapping[str, Any], dim: int) -> Rope:
    """Interpolates slow dimensions, keeps fast ones, and scales cos and sin by the attention
    factor."""
    original = _original_length(settings, hf)
    factor = _number(settings, "factor", positive(hf, "max_position_embeddings") / original)
    theta = _number(settings, "rope_theta")

    def dimension(rotations: float) -> float:
        """The dimension that turns this many times over the original length."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(_number(settings, "beta_fast", 32.0))
    high = dimension(_number(settings, "beta_slow", 1.0))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if high == low else high
    interpolated = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    inv_freq = _inv_freq(settings, dim)
    return _static(
        inv_freq / factor * interpolated + inv_freq * (1 - interpolated),
        _yarn_scale(settings, factor),
    )


def _yarn_scale(settings: dict[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if settings.get("attention_factor") is not None:
        return _number(settings, "attention_factor")
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return scale(_number(settings, "mscale")) / scale(_number(settings, "mscale_all_dim"))
    return scale(1.0)


def _inv_freq(settings: dict[str, Any], dim: int) -> np.ndarray:
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.float32(1) / np.float32(_number(settings, "rope_theta")) ** exponent


def _static(inv_freq: np.ndarray, scale: float = 1.0) -> StaticRope:
    return StaticRope(tuple(float(f) for f in inv_freq.astype(np.float32)), float(scale))


def _original_length(settings: dict[str, Any], hf: Mapping[str, Any]) -> float:
    """Length that the model was trained at. A value beside the RoPE settings wins over one inside
    them.
    """
    if hf.get("original_max_position_embeddings"):
        return positive(hf, "original_max_position_embeddings")
    return _number(
        settings, "original_max_position_embeddings", positive(hf, "max_position_embeddings")
    )


def _number(settings: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A positive finite number among the RoPE settings."""
    value = settings.get(key) or default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(
            f"config.json: RoPE setting {key} is {value!r}; {settings['rope_type']} scaling needs a positive number"
        )
    return float(value)


_KINDS: Mapping[str, Callable[[dict[str, Any], Mapping[str, Any], int], Rope]] = MappingProxyType(
    {"default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn}
)
