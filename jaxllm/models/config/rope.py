"""RoPE settings of a configuration → angles.

Frequencies are computed in float32, as `transformers.modeling_rope_utils` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.models.config.read import Config, number, positive
from jaxllm.nn.rope import DynamicRope, LongRope, PartialRope, Rope, StaticRope

ORIGINAL = "original_max_position_embeddings"


def rope(hf: Config, dim: int, layer_type: str | None = None) -> Rope:
    """The rotary embedding of a complete configuration, of `dim` turning dimensions of a head, for
    the layers of one type where types differ.

    Raises ConfigError for an unknown type and for a missing or illegal setting.
    """
    settings = rope_parameters(hf, layer_type)
    name = settings["rope_type"]
    if not isinstance(name, str) or name not in _TYPES:
        raise ConfigError(
            f"config.json: RoPE type {name!r:.80} is not supported (supported: {', '.join(_TYPES)})"
        )
    if dim % 2 and name in _HALVED:
        raise ConfigError(
            f"config.json: RoPE type {name!r} turns an even number of dimensions of a head, "
            f"not {dim}; correct partial_rotary_factor"
        )
    return _TYPES[name](settings, hf, dim)


def layer_ropes(hf: Config, dim: int, turning: int, types: Sequence[str]) -> tuple[Rope, ...]:
    """The rope of each layer, for heads of width `dim` of which `turning` dimensions turn.

    `types` has the type of each layer; where types have settings of their own, each is read.
    """
    nested = bool(_nested(hf))
    of_type: dict[str, Rope] = {}
    for layer_type in dict.fromkeys(types):
        turning_rope = rope(hf, turning, layer_type if nested else None)
        passing = (dim - turning) // 2
        if passing:
            of_type[layer_type] = PartialRope(turning_rope, passing)
        else:
            of_type[layer_type] = turning_rope
    return tuple(of_type[layer_type] for layer_type in types)


def turning_dims(hf: Config, dim: int) -> int:
    """The dimensions of a head of width `dim` that turn, by `partial_rotary_factor`.

    An odd number is that of frequencies alone: one dimension more turns, as in transformers. Raises
    ConfigError when they are none, or more than the head has.
    """
    key = "partial_rotary_factor"
    factors = [settings.get(key) for settings in (*_given(hf), hf)]
    factor = number({key: next((value for value in factors if value is not None), None)}, key, 1.0)
    turning = int(dim * factor)
    if factor > 1 or turning < 1:
        raise ConfigError(
            f"config.json: {key} is {factor}, so {turning} of {dim} dimensions of a head turn; "
            "at least one must, and no more than all"
        )
    return turning


def rotary_share(hf: Config) -> float:
    """The `partial_rotary_factor` with which `rotary_dim` dimensions of a head turn in pairs.

    Raises ConfigError when they are no even number, or more than a head has.
    """
    turning = positive(hf, "rotary_dim")
    dim = positive(hf, "hidden_size") // positive(hf, "num_attention_heads")
    if turning % 2 or turning > dim:
        raise ConfigError(
            f"config.json: rotary_dim is {turning}; it must be an even number, at most the {dim} "
            "dimensions of a head"
        )
    share = turning / dim
    if int(dim * share) == turning:
        return share
    return math.nextafter(share, 1)


def check_even(hf: Config, dim: int) -> None:
    """Raises ConfigError where an odd number of a head's `dim` dimensions turns, of a family that
    turns halves."""
    if (turning := turning_dims(hf, dim)) % 2:
        raise ConfigError(
            f"config.json: {turning} dimensions of a head turn; {hf['model_type']} models turn an "
            "even number, correct partial_rotary_factor"
        )


def rope_parameters(hf: Config, layer_type: str | None = None) -> dict[str, Any]:
    """RoPE settings in one form, always with `rope_type` and `rope_theta`.

    Read are the older `rope_scaling` beside `rope_theta`, the newer `rope_parameters`, which may
    have an object for each `layer_type`, and `type` for `rope_type`. Raises ConfigError when they
    are anything else.
    """
    stored: Any = _found(hf)
    if layer_type is not None and isinstance(stored, dict):
        stored = stored.get(layer_type)
    if not isinstance(stored, dict) or any(isinstance(value, dict) for value in stored.values()):
        layers = ", for all layers"
        if layer_type:
            layers = f" for {layer_type}"
        raise ConfigError(
            f"RoPE settings {stored!r:.200} are not supported; one flat object is expected{layers}"
        )
    settings = {key: value for key, value in stored.items() if value is not None}
    settings.setdefault("rope_type", settings.get("type", "default"))
    theta = hf.get("rope_theta")
    settings.setdefault("rope_theta", 10000.0 if theta is None else theta)
    return settings


def _found(hf: Config) -> Any:
    values = (hf.get(key) for key in ("rope_scaling", "rope_parameters"))
    return next((value for value in values if value is not None and value != {}), {})


def _nested(hf: Config) -> list[Any]:
    """The settings of each layer type, [] where all layers have the same."""
    stored = _found(hf)
    if isinstance(stored, dict):
        return [v for v in stored.values() if isinstance(v, dict)]
    return []


def _given(hf: Config) -> list[Any]:
    """Every object of settings."""
    stored = _found(hf)
    nested = _nested(hf)
    if not nested and isinstance(stored, dict):
        return [stored]
    return nested


def context_length(hf: Config) -> int:
    """Tokens that the model is made for: `max_position_embeddings`, stretched by linear, dynamic or
    YaRN scaling, unless layer types have settings of their own. Raises ConfigError as `rope`."""
    length = positive(hf, "max_position_embeddings")
    if _nested(hf):
        return length
    settings = rope_parameters(hf)
    stretched = float(length)
    if settings["rope_type"] == "yarn":
        stretched = _original_length(settings, hf)
    if settings["rope_type"] in ("linear", "dynamic", "yarn"):
        return max(int(int(stretched) * number(settings, "factor", 1.0)), length)
    return length


def _default(settings: dict[str, Any], hf: Config, dim: int) -> Rope:
    return _static(_inv_freq(settings, dim))


def _linear(settings: dict[str, Any], hf: Config, dim: int) -> Rope:
    return _static(_inv_freq(settings, dim) / np.float32(number(settings, "factor")))


def _dynamic(settings: dict[str, Any], hf: Config, dim: int) -> Rope:
    if dim < 4:
        raise ConfigError(
            f"config.json: dynamic RoPE scaling needs a head_dim of at least 4, not {dim}"
        )
    return DynamicRope(
        number(settings, "rope_theta"),
        dim,
        number(settings, "factor"),
        positive(hf, "max_position_embeddings"),
    )


def _llama3(settings: dict[str, Any], hf: Config, dim: int) -> Rope:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    inv_freq = _inv_freq(settings, dim)
    factor = number(settings, "factor")
    low = number(settings, "low_freq_factor")
    high = number(settings, "high_freq_factor")
    if high <= low:
        raise ConfigError(
            f"config.json: high_freq_factor {high} must be larger than low_freq_factor {low}"
        )
    original = _original_length(settings, hf)
    wavelength = 2 * math.pi / inv_freq
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return _static((1 - smooth) * inv_freq / factor + smooth * inv_freq)


def _longrope(settings: dict[str, Any], hf: Config, dim: int) -> Rope:
    """Each frequency divided by a factor of its own, from one of two lists."""
    original = _original_length(settings, hf)
    length = positive(hf, "max_position_embeddings")
    stretch = number(settings, "factor", length / original)
    if settings.get("attention_factor") is not None:
        scale = number(settings, "attention_factor")
    elif stretch > 1 and original > 1:
        scale = math.sqrt(1 + math.log(stretch) / math.log(original))
    else:
        scale = 1.0

    def table(key: str) -> StaticRope:
        factors = settings.get(key)
        if not isinstance(factors, list) or len(factors) != dim // 2:
            raise ConfigError(
                f"config.json: {key} is {factors!r:.80}; it must be a list of {dim // 2} numbers"
            )
        checked = [number({key: factor}, key) for factor in factors]
        return _static(_inv_freq(settings, dim) / np.array(checked, np.float32), scale)

    return LongRope(table("short_factor"), table("long_factor"), int(original), length)


def _yarn(settings: dict[str, Any], hf: Config, dim: int) -> Rope:
    """Slow dimensions are interpolated, fast ones kept; cos and sin are scaled by the attention
    factor."""
    if {"factor", ORIGINAL}.isdisjoint(settings) and hf.get(ORIGINAL) is None:
        raise ConfigError(
            f"config.json: YaRN scaling has no factor; give it, or {ORIGINAL}, which "
            "max_position_embeddings is divided by"
        )
    original = _original_length(settings, hf)
    factor = number(settings, "factor", positive(hf, "max_position_embeddings") / original)
    theta = number(settings, "rope_theta")
    if theta <= 1:
        raise ConfigError(f"config.json: rope_theta is {theta}; YaRN scaling needs more than 1")

    def dimension(rotations: float) -> float:
        """The dimension that turns this many times over the original length."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(number(settings, "beta_fast", 32.0))
    high = dimension(number(settings, "beta_slow", 1.0))
    if settings.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    if high == low:
        high = high + 0.001
    interpolated = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    inv_freq = _inv_freq(settings, dim)
    return _static(
        inv_freq / factor * interpolated + inv_freq * (1 - interpolated),
        _yarn_scale(settings, factor),
    )


def _yarn_scale(settings: dict[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        if factor > 1:
            return 0.1 * weight * math.log(factor) + 1.0
        return 1.0

    if settings.get("attention_factor") is not None:
        return number(settings, "attention_factor")
    # transformers takes a zero for an absent one, too
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return scale(number(settings, "mscale")) / scale(number(settings, "mscale_all_dim"))
    return scale(1.0)


def _inv_freq(settings: dict[str, Any], dim: int) -> np.ndarray:
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    # numpy's powers in float32 are less exact than torch's, which far positions multiply
    power = number(settings, "rope_theta") ** exponent.astype(np.float64)
    return np.float32(1) / power.astype(np.float32)


def _static(inv_freq: np.ndarray, scale: float = 1.0) -> StaticRope:
    return StaticRope(tuple(float(f) for f in inv_freq.astype(np.float32)), float(scale))


def _original_length(settings: dict[str, Any], hf: Config) -> float:
    """Tokens that the model was trained on; beside the RoPE settings it wins over inside them."""
    if hf.get(ORIGINAL) is not None:
        return positive(hf, ORIGINAL)
    return number(settings, ORIGINAL, positive(hf, "max_position_embeddings"))


_TYPES: Mapping[str, Callable[[dict[str, Any], Config, int], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
_HALVED = ("yarn", "longrope")  # have a number for each half of the dimensions
