"""DeepSeek-V2: latent attention; experts chosen by softmax, some checkpoints within groups, and
shared ones beside them. The first layers are dense."""

from __future__ import annotations

from jaxllm.config import ConfigError
from jaxllm.models.config.latent import latent_decoder, latent_names, latent_spec
from jaxllm.models.config.mixture import group_limit
from jaxllm.models.config.read import Config, number, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.routers import GroupLimit, unchanged

DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 1407,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}
NAMES = latent_names(router=("gate.weight",))
REMOTE_CODE = ("modeling_deepseek",)  # of older checkpoints


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    return latent_spec(hf, scoring_func="softmax")


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    scale = number(spec.config, "routed_scaling_factor")
    limit = _limit(spec.config)
    return latent_decoder(spec, shards, init, True, weigh=unchanged, scale=scale, limit=limit)


def _limit(hf: Config) -> GroupLimit | None:
    """By `topk_method`; a group counts as much as its best expert."""
    method = hf["topk_method"]
    if method == "greedy":
        return None
    if method == "group_limited_greedy":
        return group_limit(hf, positive(hf, "n_routed_experts"), best=1)
    raise ConfigError(
        f"config.json: topk_method is {method!r:.80}; it must be 'greedy' or 'group_limited_greedy'"
    )
