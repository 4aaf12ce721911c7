"""Checkpoint tensors → parameters on the mesh."""

from jaxllm.weights.kv_scales import kv_scales
from jaxllm.weights.load import abstract, check, load, resolve_dtype

__all__ = ["abstract", "check", "kv_scales", "load", "resolve_dtype"]
