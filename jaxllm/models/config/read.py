"""Reads a model directory's JSON files and checks them. Imports no jax."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.models.config.kv_scales import kv_cache_dtype
from jaxllm.nn.heads import Heads
from jaxllm.sampling.defaults import generation_config

MAX_JSON_BYTES = 16 * 2**20
QUANTISATION = "hf_quant_config.json"  # modelopt's


def families() -> list[str]:
    """The model types that can be served: the files of this folder."""
    folder = [str(Path(__file__).parents[1])]
    return sorted(module.name for module in pkgutil.iter_modules(folder) if not module.ispkg)


def family(model_type: str) -> ModuleType:
    """The module of one family: `build`, `rules`, `ignored`, `DEFAULTS`. Raises ConfigError for an
    unknown name."""
    if model_type not in families():
        raise ConfigError(
            f"model_type {model_type!r} is not supported; supported are {', '.join(families())}"
        )
    return importlib.import_module(f"jaxllm.models.{model_type}")


def read_config(model_dir: str | Path) -> dict[str, Any]:
    """`config.json` as it is, once it is known that it can be served; what hf_quant_config.json
    says is its `quantization_config` where it has none. Raises one ConfigError that names every
    problem."""
    directory = Path(model_dir)
    if not directory.is_dir():
        raise ConfigError(
            f"model directory {directory} does not exist; give a directory with config.json and *.safetensors"
        )
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} has no config.json; give a Hugging Face model directory")
    hf = _read_json(directory / "config.json")
    source = "quantization_config"
    if not hf.get(source) and (directory / QUANTISATION).is_file():
        hf[source] = _read_json(directory / QUANTISATION)
        source = QUANTISATION
    problems = []
    if hf.get("auto_map"):
        problems.append(
            "it asks for remote code (auto_map), which is never run; use a checkpoint whose architecture is built in"
        )
    quantisation = hf.get("quantization_config")
    if quantisation and kv_cache_dtype(quantisation) is None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        problems.append(
            f"{source} ({method or 'unknown method'}) is not supported; use an unquantized checkpoint, or one that quantises "
            "keys and values alone, to FP8"
        )
    model_type = hf.get("model_type")
    if model_type not in families():
        problems.append(
            f"model_type {model_type!r} is not supported (supported: {', '.join(families())})"
        )
    if problems:
        raise ConfigError(f"{directory / 'config.json'}: {'; '.join(problems)}")
    return hf


def with_defaults(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the family's defaults for what it leaves out."""
    return {**family(hf.get("model_type", "")).DEFAULTS, **hf}


def eos_token_ids(model_dir: str | Path, hf: Mapping[str, Any]) -> set[int]:
    """Every end-of-sequence id that config.json or generation_config.json names (each an int, a
    list or null)."""
    found: set[int] = set()
    for source in (hf, generation_config(model_dir)):
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
            raise ConfigError(
                f"eos_token_id is {value!r}; it must be an integer, a list of integers or null"
            )
        found.update(ids)
    return found


@dataclass(frozen=True)
class KVShape:
    """What the KV cache must hold. `kv_heads` counts copies: it divides over the tensor shards."""

    layers: int
    kv_heads: int
    head_dim: int


def kv_shape(hf: Mapping[str, Any], shards: int) -> KVShape:
    """Layers, stored KV heads and head width. Raises ConfigError when heads do not divide over
    `shards`."""
    full = with_defaults(hf)
    heads = read_heads(full, shards)
    return KVShape(positive(full, "num_hidden_layers"), heads.kv_stored, heads.dim)


def context_length(hf: Mapping[str, Any]) -> int:
    """Tokens that the model is made for: `max_position_embeddings`, stretched by linear, dynamic or
    YaRN scaling."""
    full = with_defaults(hf)
    length = positive(full, "max_position_embeddings")
    scaling = rope_parameters(full)
    if scaling["rope_type"] == "yarn":
        length = int(scaling.get("original_max_position_embeddings") or length)
    if scaling["rope_type"] in ("linear", "dynamic", "yarn"):
        return max(
            int(length * float(scaling.get("factor") or 1.0)),
            positive(full, "max_position_embeddings"),
        )
    return length


def rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE settings in one form: always `rope_type` and `rope_theta`. Both the older `rope_scaling`
    + `rope_theta` and the newer `rope_parameters`, and `type` for `rope_type`, are read."""
    found = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        raise ConfigError(
            f"RoPE settings {found!r:.200} are not supported; one flat object for all layers is expected"
        )
    settings = {key: value for key, value in found.items() if value is not None}
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    settings.setdefault("rope_theta", hf.get("rope_theta") or 10000.0)
    return settings


def read_heads(hf: Mapping[str, Any], shards: int) -> Heads:
    """Head counts from a complete configuration. Raises ConfigError when they do not divide."""
    query = positive(hf, "num_attention_heads")
    kv = query if hf.get("num_key_value_heads") is None else positive(hf, "num_key_value_heads")
    dim = (
        positive(hf, "hidden_size") // query
        if hf.get("head_dim") is None
        else positive(hf, "head_dim")
    )
    heads = Heads(query, kv, dim, shards)
    if problem := heads.problem():
        remedy = (
            "choose a tensor_parallel_size that divides the heads"
            if shards > 1
            else "config.json is inconsistent"
        )
        raise ConfigError(f"{problem}; {remedy}")
    if dim < 2 or dim % 2:
        raise ConfigError(
            f"config.json: head_dim is {dim}; rotary embedding needs a positive even number"
        )
    return heads


def positive(hf: Mapping[str, Any], key: str) -> int:
    """A size from the configuration. Raises ConfigError when it is missing or not a positive
    integer.
    """
    value = hf.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {key} is {value!r}; it must be a positive integer")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ConfigError(
            f"{path} is larger than {MAX_JSON_BYTES // 2**20} MiB; that is not a configuration"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; an object is expected")
    return value
