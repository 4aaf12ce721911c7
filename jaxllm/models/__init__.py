"""Model families, one file per Hugging Face `model_type`, and what can be known from a
configuration alone. Imports no jax until a family is asked for."""

from jaxllm.models.config.kv_scales import KV_SCALES, kv_cache_dtype, kv_scale_names, kv_scales_rule
from jaxllm.models.config.kv_scales import Tensors as KVTensors
from jaxllm.models.config.read import (
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
from jaxllm.nn.rules import Piece, Rule

__all__ = [
    "KV_SCALES",
    "KVShape",
    "KVTensors",
    "Piece",
    "Rule",
    "context_length",
    "eos_token_ids",
    "families",
    "family",
    "kv_cache_dtype",
    "kv_scale_names",
    "kv_scales_rule",
    "kv_shape",
    "read_config",
    "rope_parameters",
    "with_defaults",
]
