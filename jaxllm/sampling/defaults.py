"""Default sampling options of a model: its generation_config.json. Imports no jax."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.sampling.options import SamplingParams
from jaxllm.sampling.values import OptionError

# The options that a generation_config.json may set
GENERATION_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
MAX_BYTES = 16 * 2**20

logger = logging.getLogger("jaxllm")


def generation_config(directory: str | Path) -> dict[str, Any]:
    """What the model's generation_config.json says, {} when it has none. Raises ConfigError when it
    is no JSON object."""
    path = Path(directory) / "generation_config.json"
    if not os.path.lexists(path):
        return {}
    try:
        found = (
            json.loads(path.read_text(encoding="utf-8"))
            if path.is_file() and path.stat().st_size <= MAX_BYTES
            else None
        )
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path} is not a JSON object; "
            "repair it, or remove it and start with --generation-config vllm"
        )
    return found


def sampling_defaults(found: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling options of a generation_config.json, without illegal or unsupported values,
    which are logged."""
    defaults: dict[str, Any] = {}
    for name in GENERATION_OPTIONS:
        if found.get(name) is None:
            continue
        try:
            defaults[name] = getattr(SamplingParams(**{name: found[name]}), name)
        except OptionError as error:
            logger.warning("generation_config.json: %s; this default is not used", error)
    return defaults


def checked_override(wished: Mapping[str, Any]) -> dict[str, Any]:
    """The operator's values in place of generation_config.json's. Raises ConfigError on an unknown
    option or an illegal value."""
    for name, value in wished.items():
        if name not in GENERATION_OPTIONS:
            raise ConfigError(
                f"--override-generation-config has no option {name!r:.80}; "
                f"it takes {', '.join(GENERATION_OPTIONS)}"
            )
        try:
            SamplingParams(**{name: value})
        except OptionError as error:
            raise ConfigError(f"--override-generation-config: {error}") from None
    return dict(wished)
