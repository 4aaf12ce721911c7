"""Checkpoint tensors → parameters on the mesh."""

from jaxllm.weights.load import abstract, check, load, resolve_dtype

__all__ = ["abstract", "check", "load", "resolve_dtype"]
