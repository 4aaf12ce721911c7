"""Tensors on the host that are no arrays yet. Imports no jax."""

from jaxllm.tensors.deferred import Bounds, Deferred

__all__ = ["Bounds", "Deferred"]
