"""Goldens of latent attention."""

from __future__ import annotations

from typing import Any

from tests.goldens.base import case

_SIZES: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
}
_YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
}

LATENT: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": case(
        "deepseek_v2",
        **_SIZES,
        q_lora_rank="null",
        num_hidden_layers=3,
        first_k_dense_replace=1,
        n_routed_experts=6,
        n_shared_experts=2,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=False,
        scoring_func="softmax",
        moe_layer_freq=1,
        rope_theta=10000.0,
        rope_scaling={**_YARN, "mscale_all_dim": 0.707},
        auto_map={
            "AutoConfig": "configuration_deepseek.DeepseekV2Config",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
        },
    ),
    "deepseek-v2-groups-fused": case(
        "deepseek_v2",
        **_SIZES,
        q_lora_rank=12,
        n_routed_experts=8,
        n_shared_experts=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=3.0,
        attention_bias=True,
    ),
    "deepseek-v3-groups": case(
        "deepseek_v3",
        **_SIZES,
        q_lora_rank=12,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=0,
        rope_theta=10000.0,
        rope_scaling={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek-v3-halves": case(
        "deepseek_v3",
        **_SIZES,
        q_lora_rank="null",
        first_k_dense_replace=0,
        n_routed_experts=6,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
        tie_word_embeddings=True,
        num_nextn_predict_layers=0,
    ),
    "kimi-k2": case(
        "kimi_k2",
        **_SIZES,
        q_lora_rank=12,
        first_k_dense_replace=1,
        n_routed_experts=10,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        num_nextn_predict_layers=0,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        rope_theta=50000.0,
        rope_scaling={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        auto_map={
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
    ),
}
