"""DeepSeek-V3, R1 and V3.1: DeepSeek-V2 with experts chosen by corrected sigmoids within groups."""

from __future__ import annotations

from jaxllm.models.config.latent import latent_decoder, latent_names, latent_spec
from jaxllm.models.config.mixture import predicting_layers, sigmoid_routing
from jaxllm.models.config.read import Config, flag, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.deepseek_v2 import REMOTE_CODE as REMOTE_CODE
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
NAMES = latent_names(router=("gate.weight", "gate.e_score_correction_bias"))
unused = predicting_layers


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return latent_spec(hf, scoring_func="sigmoid", topk_method="noaux_tc")


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    hf = spec.config
    routing = sigmoid_routing(hf, positive(hf, "n_routed_experts"))
    return latent_decoder(spec, shards, init, flag(hf, "rope_interleave"), **routing)
