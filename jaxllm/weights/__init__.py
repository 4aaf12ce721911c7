"""Checkpoint tensors → parameters on the mesh."""

from jaxllm.weights.formats import resolve_dtype, weight_formats
from jaxllm.weights.given import GivenArrays
from jaxllm.weights.kv_scales import kv_scales
from jaxllm.weights.load import abstract, check, check_shapes, kept_entry, load

__all__ = [
    "GivenArrays",
    "abstract",
    "check",
    "check_shapes",
    "kept_entry",
    "kv_scales",
    "load",
    "resolve_dtype",
    "weight_formats",
]
