"""What `quantization_config` says of weights, and of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.quantisation import Scheme, read_scheme

KEY = "quantization_config"
# What a group of modules may quantise, in compressed-tensors' terms
GROUP_PARTS = ("weights", "input_activations", "output_activations")


def weight_scheme(hf: Mapping[str, Any], source: str = KEY) -> Scheme | None:
    """How the checkpoint packs its weights; None: they are plain numbers. `source` is where the
    operator finds the settings.

    Raises ConfigError for weights or activations that are quantised in a way that is not read.
    """
    quantisation = hf.get(KEY)
    if quantisation in (None, {}) or kv_cache_dtype(quantisation) is not None:
        return None
    given = quantisation if isinstance(quantisation, dict) else {}
    method = given.get("quant_method")
    try:
        return read_scheme(method, given)
    except ConfigError as error:
        raise ConfigError(
            f"{source} ({method or 'unknown method'!s:.80}) is not supported; {error}; use another "
            "or an unquantized checkpoint, or one that quantises keys and values alone, to FP8"
        ) from None


def kv_cache_dtype(quantisation: Any) -> str | None:
    """The `--kv-cache-dtype` that a `quantization_config` wants: "fp8_e4m3" or "auto".

    Both compressed-tensors and modelopt are read, the latter also in the form of its own
    hf_quant_config.json. None: weights or activations are quantised, or the pages otherwise.
    """
    if not isinstance(quantisation, dict):
        return None
    own = quantisation.get("quantization")  # of hf_quant_config.json
    wanted = own if isinstance(own, dict) else quantisation
    groups, scheme = wanted.get("config_groups") or {}, wanted.get("kv_cache_scheme")
    if (
        quantisation.get("quant_method", "modelopt") not in ("compressed-tensors", "modelopt")
        or any(part.get("quant_algo") or _changes_weights(part) for part in (quantisation, wanted))
        or not isinstance(groups, dict)
        or not all(isinstance(group, dict) for group in groups.values())
        or any(group.get(part) for group in groups.values() for part in GROUP_PARTS)
    ):
        return None
    if isinstance(scheme, dict):
        return "fp8_e4m3" if scheme.get("num_bits") == 8 and scheme.get("type") == "float" else None
    algorithm = wanted.get("kv_cache_quant_algo", "") if scheme is None else ""
    return "fp8_e4m3" if algorithm == "FP8" else "auto" if algorithm is None else None


def _changes_weights(quantisation: dict[str, Any]) -> bool:
    """Whether weights are stored sparse, or activations are rotated before them."""
    sparsity = quantisation.get("sparsity_config")
    return bool(quantisation.get("transform_config")) or (
        isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense")
    )
