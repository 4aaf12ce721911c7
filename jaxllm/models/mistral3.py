"""Mistral Small 3 and Ministral 3 that also see: the language model inside them, a Mistral or a
Ministral 3. Images are not read."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.models import ministral3, mistral
from jaxllm.models.config.read import Config, text_part
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import LLAMA_NAMES, WRAPPER_PREFIXES
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {}  # those of the language model
NAMES = LLAMA_NAMES
PREFIXES = WRAPPER_PREFIXES


def read(hf: Config) -> dict[str, Any]:
    """The language model's configuration, completed, with its type as `text_model_type`."""
    inner = hf.get("text_config")
    if not isinstance(inner, dict):
        return dict(hf)
    text_type = {"text_model_type": inner.get("model_type")}
    defaults = _family(text_type).DEFAULTS
    absent = {key: None for key in defaults if key in inner and inner[key] is None}
    return {**defaults, **text_part(hf), **absent, **text_type}


def _family(hf: Config) -> ModuleType:
    if hf.get("text_model_type") == "ministral3":
        return ministral3
    return mistral


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    if (text_type := hf.get("text_model_type")) not in (None, "mistral", "ministral3"):
        raise ConfigError(
            f"config.json: text_config's model_type is {text_type!r:.80}; it must be 'mistral' or "
            "'ministral3'"
        )
    text_spec: ModelSpec = _family(hf).spec({**mistral.DEFAULTS, **hf})
    return text_spec


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    model: Decoder = _family(spec.config).build(spec, shards, init)
    return model
