"""What the goldens cover: one tiny checkpoint per family and feature, each a `config.json` as
checkpoints have it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tests.goldens.alibi_cases import ALIBI
from tests.goldens.base import case
from tests.goldens.dense_cases import DENSE_CASES
from tests.goldens.gpt_cases import GPT_CASES
from tests.goldens.latent_cases import LATENT
from tests.goldens.mixture_cases import MIXTURES

PROMPT_LENGTHS = (1, 7, 40, 150)
NEW_TOKENS = 24

CASES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "llama-gqa": case("llama", torch_dtype="float32"),
        "llama-mha-biases": case(
            "llama", num_key_value_heads=None, attention_bias=True, mlp_bias=True, vocab_size=67
        ),
        "llama-mqa-tied-linear": case(
            "llama",
            num_key_value_heads=1,
            tie_word_embeddings=True,
            rope_theta=5000.0,
            rope_scaling={"type": "linear", "factor": 3.0},
        ),
        "llama-dynamic": case(
            "llama", max_position_embeddings=64, rope_scaling={"type": "dynamic", "factor": 3.0}
        ),
        "llama-yarn": case(
            "llama",
            max_position_embeddings=256,
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        "llama-llama3": case(
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
        "llama-head-dim-sharded": case("llama", head_dim=12, hidden_act="gelu_pytorch_tanh"),
        "mistral-window": case(
            "mistral", sliding_window=16, head_dim=16, num_attention_heads=4, rope_theta=1000000.0
        ),
        "mistral-full-mqa": case(
            "mistral", sliding_window="null", num_key_value_heads=1, hidden_act="gelu"
        ),
        "mistral-window-yarn": case(
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
        "qwen2-tied": case(
            "qwen2",
            tie_word_embeddings=True,
            use_sliding_window=False,
            sliding_window=16,
            max_window_layers=0,
        ),
        "qwen2-window-mha": case(
            "qwen2",
            num_key_value_heads=8,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=1,
            rope_theta=1000000.0,
        ),
        "qwen2-layer-types-linear": case(
            "qwen2",
            use_sliding_window=True,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        ),
        "qwen2-yarn": case(
            "qwen2",
            max_position_embeddings=64,
            rope_theta=1000000.0,
            rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        "qwen3-gqa": case(
            "qwen3",
            head_dim=16,
            tie_word_embeddings=True,
            rope_theta=1000000.0,
            use_sliding_window=False,
        ),
        "qwen3-bias-window": case(
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
        "qwen3-dynamic": case(
            "qwen3",
            head_dim=8,
            num_key_value_heads=8,
            max_position_embeddings=48,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        ),
        "qwen3-yarn-mscale": case(
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
        "qwen3-yarn-attention-factor": case(
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
        "qwen3-llama3": case(
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
        "gemma2-window": case(
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
        "gemma3_text-older-keys": case(
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
            "text_config": case(
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
        "phi3-window": case("phi3", num_key_value_heads=4, sliding_window=11, pad_token_id=0),
        # Short factors: neither transformers nor the engine goes beyond the original length
        "phi3-short-partial": case(
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
        "phi3-long": case(
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
        "granite-multipliers": case(
            "granite",
            embedding_multiplier=3.0,
            attention_multiplier=0.4,
            residual_multiplier=0.3,
            logits_scaling=2.5,
        ),
        "granite-biases": case(
            "granite", attention_bias=True, mlp_bias=True, attention_multiplier=0.5
        ),
        "glm-biases": case("glm", num_attention_heads=4, head_dim=8, pad_token_id=0),
        "glm4-quarter": case(
            "glm4",
            num_attention_heads=4,
            head_dim=16,
            pad_token_id=0,
            attention_bias=False,
            partial_rotary_factor=0.25,
        ),
        "helium-biases": case(
            "helium",
            num_attention_heads=4,
            head_dim=8,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            pad_token_id=0,
        ),
        **MIXTURES,
        **LATENT,
        **ALIBI,
        **DENSE_CASES,
        **GPT_CASES,
    }
)
