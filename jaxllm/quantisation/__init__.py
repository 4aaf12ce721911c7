"""How checkpoints store weights in fewer bits than the model computes in. Imports no jax."""

from jaxllm.quantisation.registry import common_name, methods, read_scheme
from jaxllm.quantisation.scheme import Bounds, PackedPart, PackedTensor, Scheme
from jaxllm.quantisation.weight_format import ONLINE, WeightFormat

__all__ = [
    "ONLINE",
    "Bounds",
    "PackedPart",
    "PackedTensor",
    "Scheme",
    "WeightFormat",
    "common_name",
    "methods",
    "read_scheme",
]
