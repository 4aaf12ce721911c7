"""Solar Open: GLM-4.5 with a mixture in every layer and heads that turn whole."""

from __future__ import annotations

from jaxllm.models import glm4_moe
from jaxllm.models.config.read import Config, positive
from jaxllm.models.config.spec import ModelSpec

SAME = (
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "num_key_value_heads",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "norm_topk_prob",
)
DEFAULTS: Config = {
    **{key: glm4_moe.DEFAULTS[key] for key in SAME},
    "head_dim": 128,
    "rope_theta": 1000000.0,
    "moe_intermediate_size": 1280,
}
NAMES = glm4_moe.NAMES
build = glm4_moe.build
REMOTE_CODE = ("modeling_solar_open",)


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Keys of GLM's other layers are not read. Raises
    ConfigError."""
    inner = {"intermediate_size": positive(hf, "moe_intermediate_size")}
    return glm4_moe.spec({**inner, **hf, "first_k_dense_replace": 0, "use_qk_norm": False})
