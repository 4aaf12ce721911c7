"""GLM-4.7-Flash: DeepSeek-V3's latent attention and mixtures; the first layer is dense, unless each
layer's type says otherwise."""

from __future__ import annotations

from jaxllm.models import deepseek_v3
from jaxllm.models.config.latent import latent_spec
from jaxllm.models.config.mixture import predicting_layers
from jaxllm.models.config.read import Config
from jaxllm.models.config.spec import ModelSpec

SAME = ("hidden_act", "kv_lora_rank", "qk_rope_head_dim", "rope_interleave", "norm_topk_prob")
DEFAULTS: Config = {
    **{key: deepseek_v3.DEFAULTS[key] for key in SAME},
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
}
NAMES = deepseek_v3.NAMES
build = deepseek_v3.build
unused = predicting_layers


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    usual = {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
    return latent_spec({**usual, **hf}, scoring_func="sigmoid", topk_method="noaux_tc")
