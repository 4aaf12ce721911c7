"""Checkpoint tensors → parameters on the mesh."""

from jaxllm.weights.check import check, check_shapes
from jaxllm.weights.formats import resolve_dtype, weight_formats
from jaxllm.weights.given import GivenArrays
from jaxllm.weights.kv_scales import kv_scales
from jaxllm.weights.load import kept_entry, load
from jaxllm.weights.loader import Loader
from jaxllm.weights.model_files import Model, ModelFiles
from jaxllm.weights.outline import Outline, outline

__all__ = [
    "GivenArrays",
    "Loader",
    "Model",
    "ModelFiles",
    "Outline",
    "check",
    "check_shapes",
    "kept_entry",
    "kv_scales",
    "load",
    "outline",
    "resolve_dtype",
    "weight_formats",
]
