"""jaxllm: LLM inference in pure JAX. Names are loaded on first use, so `import jaxllm` imports no
jax."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.config import ConfigError, EngineConfig
    from jaxllm.grammar.structure import (
        GuidedDecodingParams,
        StructuredOutputsParams,
        StructureError,
    )
    from jaxllm.library.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        RequestOutput,
    )
    from jaxllm.llm import LLM
    from jaxllm.messages import RequestError
    from jaxllm.pooled import PoolingParams
    from jaxllm.sampling.options import BeamSearchParams, SamplingParams
    from jaxllm.sampling.values import OptionError

__version__ = "0.1.0"

_HOME = {
    "LLM": "jaxllm.llm",
    "BeamSearchOutput": "jaxllm.library.outputs",
    "BeamSearchParams": "jaxllm.sampling.options",
    "BeamSearchSequence": "jaxllm.library.outputs",
    "CompletionOutput": "jaxllm.library.outputs",
    "ConfigError": "jaxllm.config",
    "EngineConfig": "jaxllm.config",
    "GuidedDecodingParams": "jaxllm.grammar.structure",
    "Logprob": "jaxllm.library.outputs",
    "OptionError": "jaxllm.sampling.values",
    "PoolingParams": "jaxllm.pooled",
    "RequestError": "jaxllm.messages",
    "RequestOutput": "jaxllm.library.outputs",
    "SamplingParams": "jaxllm.sampling.options",
    "StructureError": "jaxllm.grammar.structure",
    "StructuredOutputsParams": "jaxllm.grammar.structure",
}

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "GuidedDecodingParams",
    "Logprob",
    "OptionError",
    "PoolingParams",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructureError",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """The public name from the module that owns it. Raises AttributeError for any other name."""
    if name not in _HOME:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
