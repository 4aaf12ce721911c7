"""Default sampling options of a model: its generation_config.json. Imports no jax."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.locate import read_json
from jaxllm.sampling.options import SamplingParams
from jaxllm.sampling.values import OptionError

# The options that a generation_config.json may set
GENERATION_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

logger = logging.getLogger("jaxllm")


def generation_config(directory: str | Path) -> dict[str, Any]:
    """What the model's generation_config.json says, {} when it has none. Raises ConfigError as
    `read_json`."""
    path = Path(directory) / "generation_config.json"
    if os.path.lexists(path):
        return read_json(path)
    return {}


def sampling_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling options of a generation_config.json, without illegal or unsupported values,
    which are logged."""
    defaults: dict[str, Any] = {}
    for name in GENERATION_OPTIONS:
        if settings.get(name) is None:
            continue
        try:
            defaults[name] = getattr(SamplingParams(**{name: settings[name]}), name)
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
