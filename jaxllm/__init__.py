"""jaxllm: LLM inference in pure JAX. Names are loaded on first use, so `import jaxllm` imports no jax."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.config import ConfigError, EngineConfig
    from jaxllm.llm import LLM, CompletionOutput, RequestOutput
    from jaxllm.sampling.options import OptionError, SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "CompletionOutput", "ConfigError", "EngineConfig", "OptionError", "RequestOutput", "SamplingParams", "__version__"]

_HOME = {
    "LLM": "jaxllm.llm",
    "CompletionOutput": "jaxllm.llm",
    "ConfigError": "jaxllm.config",
    "EngineConfig": "jaxllm.config",
    "OptionError": "jaxllm.sampling.options",
    "RequestOutput": "jaxllm.llm",
    "SamplingParams": "jaxllm.sampling.options",
}


def __getattr__(name: str) -> Any:
    """The public name from the module that owns it. Raises AttributeError for any other name."""
    if name not in _HOME:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
