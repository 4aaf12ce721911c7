"""The schemes, found by listing their folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.quantisation.scheme import Scheme


def methods() -> list[str]:
    """The `quant_method`s that can be read: the files of `schemes/`, with hyphens."""
    folder = [str(Path(__file__).parent / "schemes")]
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(folder))


def common_name(method: str) -> str:
    """What older checkpoints and other writers call a `quant_method`, as `methods` has it."""
    return method.lower().replace("_", "-").removeprefix("intel/")


def read_scheme(method: object, settings: Mapping[str, Any]) -> Scheme:
    """The scheme of a `quant_method` with the settings beside it.

    Raises ConfigError for an unknown method and for settings that it cannot have.
    """
    usual_name = None
    if isinstance(method, str):
        usual_name = common_name(method)
    if usual_name not in methods():
        raise ConfigError(f"methods that are read are {', '.join(methods())}")
    name = f"jaxllm.quantisation.schemes.{usual_name.replace('-', '_')}"
    scheme: Scheme = importlib.import_module(name).read(settings)
    return scheme
