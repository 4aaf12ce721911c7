"""What the goldens cover: one tiny checkpoint per family and feature, each a `config.json` as
checkpoints have it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PROMPT_LENGTHS = (1, 7, 40, 150)
NEW_TOKENS = 24

_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _case(model_type: str, **changes: Any) -> dict[str, Any]:
    """A configuration; a change to None removes the key, "null" stays as JSON null."""
    merged = {"model_type": model_type, **_BASE, **changes}
    return {
        key: (None if value == "null" else value)
        for key, value in merged.items()
        if value is not None
    }


CASES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "llama-gqa": _case("llama", torch_dtype="float32"),
        "llama-mha-biases": _case(
            "llama", num_key_value_heads=None, attention_bias=True, mlp_bias=True, vocab_size=67
        ),
        "llama-mqa-tied-linear": _case(
            "llama",
            num_key_value_heads=1,
            tie_word_embeddings=True,
            rope_theta=5000.0,
            rope_scaling={"type": "linear", "factor": 3.0},
        ),
        "llama-dynamic": _case(
            "llama", max_position_embeddings=64, rope_scaling={"type": "dynamic", "factor": 3.0}
        ),
        "llama-yarn": _case(
            "llama",
            max_position_embeddings=256,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        "llama-llama3": _case(
            "llama",
            rope_theta=500000.0,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        "llama-head-dim-sharded": _case("llama", head_dim=12, hidden_act="gelu_pytorch_tanh"),
        "mistral-window": _case(
            "mistral", sliding_window=16, head_dim=16, num_attention_heads=4, rope_theta=1000000.0
        ),
        "mistral-full-mqa": _case(
            "mistral", sliding_window="null", num_key_value_heads=1, hidden_act="gelu"
        ),
        "mistral-window-yarn": _case(
            "mistral",
            sliding_window=48,
            max_position_embeddings=64,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 20000.0,
                "factor": 4.0,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
            },
        ),
        "qwen2-tied": _case(
            "qwen2",
            tie_word_embeddings=True,
            use_sliding_window=False,
            sliding_window=16,
            max_window_layers=0,
        ),
        "qwen2-window-mha": _case(
            "qwen2",
            num_key_value_heads=8,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=1,
            rope_theta=1000000.0,
        ),
        "qwen2-layer-types-linear": _case(
            "qwen2",
            use_sliding_window=True,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        ),
        "qwen2-yarn": _case(
            "qwen2",
            max_position_embeddings=64,
            rope_theta=1000000.0,
            rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        "mixtral-experts": _case("mixtral", num_local_experts=6, intermediate_size=16),
        "mixtral-fused-window": _case(
            "mixtral",
            num_local_experts=4,
            num_experts_per_tok=3,
            intermediate_size=16,
            sliding_window=20,
            hidden_act="gelu",
            rope_theta=10000.0,
        ),
        "qwen2-moe-shared": _case(
            "qwen2_moe",
            num_hidden_layers=3,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=12,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=2,
            mlp_only_layers=[1],
        ),
        "qwen2-moe-fused-normalised": _case(
            "qwen2_moe",
            num_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=12,
            shared_expert_intermediate_size=16,
            norm_topk_prob=True,
            qkv_bias=False,
        ),
        "qwen3-moe-normalised": _case(
            "qwen3_moe",
            head_dim=8,
            num_experts=12,
            num_experts_per_tok=4,
            moe_intermediate_size=8,
            norm_topk_prob=True,
            tie_word_embeddings=True,
        ),
        "qwen3-moe-sparse-step": _case(
            "qwen3_moe",
            num_hidden_layers=3,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            decoder_sparse_step=2,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=16,
        ),
        "glm4-moe-groups": _case(
            "glm4_moe",
            head_dim=8,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.8,
            attention_bias=True,
            use_qk_norm=True,
            num_nextn_predict_layers=0,
        ),
        "glm4-moe-one-group-fused": _case(
            "glm4_moe",
            head_dim=12,
            n_routed_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=8,
            n_shared_experts=2,
            norm_topk_prob=False,
            partial_rotary_factor=0.667,
            num_nextn_predict_layers=0,
        ),
        "ernie4-5-moe": _case(
            "ernie4_5_moe",
            num_hidden_layers=3,
            moe_num_experts=6,
            moe_k=2,
            moe_intermediate_size=8,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            tie_word_embeddings=True,
        ),
        "ernie4-5-moe-bias": _case(
            "ernie4_5_moe",
            head_dim=8,
            moe_num_experts=4,
            moe_k=3,
            moe_intermediate_size=8,
            moe_num_shared_experts=0,
            moe_layer_interval=2,
            moe_layer_start_index=0,
            moe_layer_end_index=1,
            use_bias=True,
        ),
        "granitemoe-multipliers": _case(
            "granitemoe",
            intermediate_size=8,
            num_local_experts=8,
            num_experts_per_tok=3,
            embedding_multiplier=3.0,
            attention_multiplier=0.4,
            residual_multiplier=0.7,
            logits_scaling=2.5,
        ),
        "granitemoe-plain-fused": _case(
            "granitemoe",
            num_key_value_heads=None,
            intermediate_size=8,
            num_local_experts=4,
            attention_bias=True,
        ),
        "qwen3-gqa": _case(
            "qwen3",
            head_dim=16,
            tie_word_embeddings=True,
            rope_theta=1000000.0,
            use_sliding_window=False,
        ),
        "qwen3-bias-window": _case(
            "qwen3",
            head_dim=8,
            num_key_value_heads=1,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=20,
            max_window_layers=1,
        ),
        # The prompt of 40 grows past the native length while it generates, that of 150 begins
        # beyond it
        "qwen3-dynamic": _case(
            "qwen3",
            head_dim=8,
            num_key_value_heads=8,
            max_position_embeddings=48,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        ),
        "qwen3-yarn-mscale": _case(
            "qwen3",
            head_dim=16,
            max_position_embeddings=256,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.2,
                "mscale_all_dim": 0.7,
                "truncate": False,
            },
        ),
        "qwen3-yarn-attention-factor": _case(
            "qwen3",
            head_dim=8,
            max_position_embeddings=128,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.25,
            },
        ),
        "qwen3-llama3": _case(
            "qwen3",
            head_dim=8,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 2.0,
                "original_max_position_embeddings": 48,
            },
        ),
        "gemma2-window": _case(
            "gemma2",
            num_hidden_layers=3,
            num_attention_heads=4,
            head_dim=12,
            sliding_window=16,
            hidden_act=None,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=20,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=6.0,
            tie_word_embeddings=True,
        ),
        "gemma3_text-older-keys": _case(
            "gemma3_text",
            num_hidden_layers=3,
            num_attention_heads=4,
            head_dim=8,
            sliding_window=16,
            sliding_window_pattern=3,
            hidden_act=None,
            rope_theta=100000.0,
            rope_local_base_freq=500.0,
            rope_scaling={"rope_type": "linear", "factor": 4.0},
            query_pre_attn_scalar=8,
            tie_word_embeddings=True,
        ),
        "gemma3-vision": {
            "model_type": "gemma3",
            "text_config": _case(
                "gemma3_text",
                num_attention_heads=4,
                num_key_value_heads=1,
                head_dim=8,
                sliding_window=16,
                hidden_act=None,
                layer_types=["sliding_attention", "full_attention"],
                rope_parameters={
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                    "full_attention": {
                        "rope_type": "linear",
                        "rope_theta": 20000.0,
                        "factor": 2.0,
                    },
                },
            ),
            "vision_config": {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "image_size": 8,
                "patch_size": 4,
            },
            "mm_tokens_per_image": 4,
            "eos_token_id": [2, 5],
            "tie_word_embeddings": True,
        },
        "phi3-window": _case("phi3", num_key_value_heads=4, sliding_window=11, pad_token_id=0),
        # Short factors: neither transformers nor the engine goes beyond the original length
        "phi3-short-partial": _case(
            "phi3",
            head_dim=None,
            num_attention_heads=4,
            tie_word_embeddings=True,
            pad_token_id=0,
            original_max_position_embeddings=256,
            partial_rotary_factor=0.75,
            rope_scaling={
                "type": "longrope",
                "short_factor": [1.0, 1.5, 2.5],
                "long_factor": [2.0, 4.0, 9.0],
            },
        ),
        # Long factors: a lone first token does not turn, so transformers always takes them, too
        "phi3-long": _case(
            "phi3",
            num_attention_heads=4,
            pad_token_id=0,
            original_max_position_embeddings=1,
            rope_scaling={
                "type": "su",
                "original_max_position_embeddings": 1,
                "short_factor": [1.0, 1.0, 1.0, 1.0],
                "long_factor": [1.0, 2.0, 4.5, 9.0],
                "attention_factor": 1.2,
            },
        ),
        "granite-multipliers": _case(
            "granite",
            embedding_multiplier=3.0,
            attention_multiplier=0.4,
            residual_multiplier=0.3,
            logits_scaling=2.5,
        ),
        "granite-biases": _case(
            "granite", attention_bias=True, mlp_bias=True, attention_multiplier=0.5
        ),
        "glm-biases": _case("glm", num_attention_heads=4, head_dim=8, pad_token_id=0),
        "glm4-quarter": _case(
            "glm4",
            num_attention_heads=4,
            head_dim=16,
            pad_token_id=0,
            attention_bias=False,
            partial_rotary_factor=0.25,
        ),
    }
)
