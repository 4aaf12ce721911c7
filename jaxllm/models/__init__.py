"""Model families, one file per Hugging Face `model_type`, and what can be known of a model from its
configuration alone. Imports no jax until a family is asked for."""

from jaxllm.models.config.pooling import Wish
from jaxllm.models.config.read import check_sizes, families, family, read_config, state, summary
from jaxllm.models.config.spec import ModelSpec, make_spec, read_spec

__all__ = [
    "ModelSpec",
    "Wish",
    "check_sizes",
    "families",
    "family",
    "make_spec",
    "read_config",
    "read_spec",
    "state",
    "summary",
]
