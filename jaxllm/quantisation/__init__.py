"""How checkpoints store weights in fewer bits than the model computes in. Imports no jax."""

from jaxllm.quantisation.registry import methods, read_scheme
from jaxllm.quantisation.scheme import Bounds, PackedPart, PackedTensor, Scheme

__all__ = ["Bounds", "PackedPart", "PackedTensor", "Scheme", "methods", "read_scheme"]
