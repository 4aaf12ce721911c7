"""What `quantization_config` says of weights, and of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.quantisation import Scheme, common_name, read_scheme

KEY = "quantization_config"
# What a group of modules may quantise, in compressed-tensors' terms
GROUP_PARTS = ("weights", "input_activations", "output_activations")


def weight_scheme(hf: Mapping[str, Any], source: str = KEY) -> Scheme | None:
    """How the checkpoint packs its weights; None: they are plain numbers. `source` is where the
    operator finds the settings.

    Raises ConfigError for weights or activations that are quantised in a way that is not read.
    """
    quantisation = hf.get(KEY)
    if quantisation in (None, {}) or leaves_weights(quantisation):
        return None
    if isinstance(quantisation, dict):
        settings = quantisation
    else:
        settings = {}
    nested = isinstance(settings.get("quantization"), dict)  # hf_quant_config.json
    method = settings.get("quant_method", "modelopt" if nested else None)
    try:
        return read_scheme(method, settings)
    except ConfigError as error:
        name = str(method or "unknown method")
        if name.isprintable():
            shown = name
        else:
            shown = repr(name)
        raise ConfigError(
            f"{source} ({shown:.80}) is not supported; {error}; use another "
            "or an unquantized checkpoint, or one that quantises keys and values alone, to FP8"
        ) from None


def kv_cache_dtype(quantisation: Any) -> str | None:
    """The `--kv-cache-dtype` that a `quantization_config` wants: "fp8_e4m3" or "auto".

    Both compressed-tensors and modelopt are read, the latter also in the form of its own
    hf_quant_config.json. None: another method, or pages of another type.
    """
    if not isinstance(quantisation, dict) or not _is_read(quantisation):
        return None
    wanted = _settings(quantisation)
    scheme = wanted.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        if scheme.get("num_bits") == 8 and scheme.get("type") == "float":
            return "fp8_e4m3"
        return None
    algorithm = ""
    if scheme is None:
        algorithm = wanted.get("kv_cache_quant_algo", "")
    if algorithm == "FP8":
        return "fp8_e4m3"
    if algorithm is None:
        return "auto"
    return None


def leaves_weights(quantisation: Any) -> bool:
    """Whether keys and values alone are quantised, in a way that is read."""
    if kv_cache_dtype(quantisation) is None:
        return False
    wanted = _settings(quantisation)
    groups = wanted.get("config_groups") or {}
    return not (
        any(part.get("quant_algo") or _changes_weights(part) for part in (quantisation, wanted))
        or not isinstance(groups, dict)
        or not all(isinstance(group, dict) for group in groups.values())
        or any(group.get(part) for group in groups.values() for part in GROUP_PARTS)
    )


def _is_read(quantisation: dict[str, Any]) -> bool:
    method = quantisation.get("quant_method", "modelopt")
    return isinstance(method, str) and common_name(method) in ("compressed-tensors", "modelopt")


def _settings(quantisation: dict[str, Any]) -> dict[str, Any]:
    nested = quantisation.get("quantization")  # of hf_quant_config.json
    if isinstance(nested, dict):
        return nested
    return quantisation


def _changes_weights(quantisation: dict[str, Any]) -> bool:
    """Whether weights are stored sparse, or activations are rotated before them."""
    sparsity = quantisation.get("sparsity_config")
    return bool(quantisation.get("transform_config")) or (
        isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense")
    )
