"""Checkpoint tensors → parameters on the mesh."""

from jaxllm.weights.load import abstract, load, resolve_dtype

__all__ = ["abstract", "load", "resolve_dtype"]
