"""Model families, one file per Hugging Face `model_type`, and what can be known from a configuration alone. Imports no jax
until a family is asked for."""

from jaxllm.models._config import (
    KVShape,
    context_length,
    eos_token_ids,
    families,
    family,
    kv_shape,
    read_config,
    rope_parameters,
    with_defaults,
)
from jaxllm.models._rules import Piece, Rule

__all__ = [
    "KVShape",
    "Piece",
    "Rule",
    "context_length",
    "eos_token_ids",
    "families",
    "family",
    "kv_shape",
    "read_config",
    "rope_parameters",
    "with_defaults",
]
