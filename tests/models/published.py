"""Configs of published models, as far as a model is made of them."""

from __future__ import annotations

from typing import Any

from tests.models.test_published_sizes import DEEPSEEK, EXACT, LLAMA, YARN, sized

SLIDING, FULL = "sliding_attention", "full_attention"
HUNYUAN_ROPE = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.0078125,
    "residual_multiplier": 0.22,
    "logits_scaling": 16.0,
    "rope_theta": 5e6,
    "tie_word_embeddings": True,
}
KIMI = {
    **DEEPSEEK,
    "rope_scaling": YARN | {"factor": 32.0, "beta_fast": 1.0},
    "rope_theta": 50000.0,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 1536,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 0,
}
GLM_AIR = {
    "head_dim": 128,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": True,
    "use_qk_norm": False,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1e6,
    "routed_scaling_factor": 1.0,
}
ERNIE_MOE = {
    "rope_theta": 5e5,
    "use_bias": False,
    "tie_word_embeddings": True,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}
HUNYUAN_MOE = {
    "head_dim": 128,
    "num_experts": 64,
    "moe_topk": [8] * 32,
    "num_shared_expert": [1] * 32,
    "use_cla": False,
    "rope_scaling": HUNYUAN_ROPE,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
GEMMA3_27B = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
    "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}
CHATGLM = {
    "model_type": "chatglm",
    "hidden_size": 4096,
    "ffn_hidden_size": 13696,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "add_bias_linear": False,
    "add_qkv_bias": True,
}
ENCODER = {
    "hidden_act": "gelu",
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
}
OLMO3_ROPE = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32,
    "beta_slow": 1,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}

PUBLISHED: dict[str, dict[str, Any]] = {name: hf for name, (hf, _) in EXACT.items()} | {
    "Llama-3.1-8B-Instruct": EXACT["Llama-3.1-8B"][0]
    | {
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3,
        "max_position_embeddings": 131072,
        "eos_token_id": [128001, 128008, 128009],
    },
    "Gemma-2-27B": EXACT["Gemma-2-9B"][0]
    | {
        "num_hidden_layers": 46,
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 144,
    },
    "Gemma-3-27B": {
        "model_type": "gemma3",
        "text_config": GEMMA3_27B,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
        "eos_token_id": [1, 106],
        "mm_tokens_per_image": 256,
    },
    "Phi-3-mini-128k": EXACT["Phi-3-mini"][0]
    | {
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": LONGROPE,
        "sliding_window": 262144,
    },
    "Phi-4-mini": sized(LLAMA, "phi3", 32, 3072, 8192, 24, 8, 200064)
    | {
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rope_scaling": LONGROPE,
        "tie_word_embeddings": True,
    },
    "Kimi-K2": sized(LLAMA, "kimi_k2", 61, 7168, 18432, 64, 64, 163840) | KIMI,
    "GLM-4.5-Air": sized(LLAMA, "glm4_moe", 46, 4096, 10944, 96, 8, 151552) | GLM_AIR,
    "GLM-4-9B-0414": sized(LLAMA, "glm4", 40, 4096, 13696, 32, 2, 151552)
    | {"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
    "MiniMax-M2": sized(LLAMA, "minimax_m2", 62, 3072, 1536, 48, 8, 200064)
    | {"head_dim": 128, "rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8},
    "Granite-3.1-8B": sized(LLAMA, "granite", 40, 4096, 12800, 32, 8, 49155) | GRANITE,
    "Command-R": sized(LLAMA, "cohere", 40, 8192, 22528, 64, 64, 256000)
    | {"rope_theta": 8e6, "layer_norm_eps": 1e-5, "tie_word_embeddings": True},
    "Command-R-plus": sized(LLAMA, "cohere", 64, 12288, 33792, 96, 8, 256000)
    | {"use_qk_norm": True, "logit_scale": 0.8333333333333334, "tie_word_embeddings": True},
    "Command-R7B": sized(LLAMA, "cohere2", 32, 4096, 14336, 32, 8, 256000)
    | {"logit_scale": 0.25, "rope_theta": 50000, "tie_word_embeddings": True},
    "OLMo-2-7B": sized(LLAMA, "olmo2", 32, 4096, 11008, 32, 32, 100352) | {"rope_theta": 5e5},
    "OLMo-3-7B": sized(LLAMA, "olmo3", 32, 4096, 11008, 32, 32, 100278)
    | {"rope_theta": 5e5, "rope_scaling": OLMO3_ROPE, "max_position_embeddings": 65536},
    "OLMo-1.7-7B": sized(LLAMA, "olmo", 32, 4096, 11008, 32, 32, 50304) | {"clip_qkv": 8.0},
    "GPT-NeoX-20B": EXACT["Pythia-1.4B"][0]
    | {
        "num_hidden_layers": 44,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_attention_heads": 64,
        "vocab_size": 50432,
        "hidden_act": "gelu_fast",
    },
    "Falcon-40B": EXACT["Falcon-7B"][0]
    | {
        "num_hidden_layers": 60,
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    },
    "FlexOlmo-7x7B-1T": sized(LLAMA, "flex_olmo", 32, 4096, 11008, 32, 32, 100352)
    | {"rms_norm_eps": 1e-6, "num_experts": 7, "num_experts_per_tok": 5},
    "ERNIE-4.5-0.3B": sized(LLAMA, "ernie4_5", 18, 1024, 3072, 16, 2, 103424)
    | {"head_dim": 128, "use_bias": False, "tie_word_embeddings": True},
    "ERNIE-4.5-21B-A3B": sized(LLAMA, "ernie4_5_moe", 28, 2560, 12288, 20, 4, 103424) | ERNIE_MOE,
    "Hunyuan-A13B": sized(LLAMA, "hunyuan_v1_moe", 32, 4096, 3072, 32, 8, 128167) | HUNYUAN_MOE,
    "Hunyuan-7B": sized(LLAMA, "hunyuan_v1_dense", 32, 4096, 14336, 32, 8, 128167)
    | {"head_dim": 128, "rope_scaling": HUNYUAN_ROPE, "tie_word_embeddings": True},
    "Seed-OSS-36B": sized(LLAMA, "seed_oss", 64, 5120, 27648, 80, 8, 155136)
    | {"head_dim": 128, "attention_bias": True, "attention_out_bias": False, "rope_theta": 1e7},
    "EXAONE-4.0-32B": sized(LLAMA, "exaone4", 64, 5120, 27392, 40, 8, 102400)
    | {
        "head_dim": 128,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 16,
        "rope_theta": 1e6,
        "rope_scaling": LLAMA3 | {"factor": 16.0},
        "max_position_embeddings": 131072,
    },
    "EXAONE-4.0-1.2B": sized(LLAMA, "exaone4", 30, 2048, 4096, 32, 8, 102400)
    | {"sliding_window": None, "layer_types": [FULL] * 30, "tie_word_embeddings": True},
    "ChatGLM3-6B": CHATGLM | {"num_layers": 28, "padded_vocab_size": 65024, "seq_length": 8192},
    "GLM-4-9B-chat": CHATGLM
    | {"num_layers": 40, "padded_vocab_size": 151552, "seq_length": 131072, "rope_ratio": 500}
    | {"layernorm_epsilon": 1.5625e-07},
    "InternLM2.5-7B": sized(LLAMA, "internlm2", 32, 4096, 14336, 32, 8, 92544)
    | {"bias": False, "rope_theta": 1e6, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    | {"max_position_embeddings": 32768},
    "Minitron-4B": sized(LLAMA, "nemotron", 32, 3072, 9216, 24, 8, 256000)
    | {"head_dim": 128, "norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "Qwen1.5-MoE-A2.7B": sized(LLAMA, "qwen2_moe", 24, 2048, 5632, 16, 16, 151936)
    | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    | {"shared_expert_intermediate_size": 5632, "use_sliding_window": False},
    "Mistral-Small-3.1": {
        "model_type": "mistral3",
        "text_config": sized(LLAMA, "mistral", 40, 5120, 32768, 32, 8, 131072)
        | {"head_dim": 128, "rope_theta": 1e9, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", "hidden_size": 1024},
    },
    "Qwen3-Embedding-0.6B": EXACT["Qwen3-0.6B"][0] | {"vocab_size": 151669},
    "BGE-large-en": ENCODER | {"model_type": "bert", "vocab_size": 30522},
    "BGE-M3": ENCODER
    | {"model_type": "xlm-roberta", "vocab_size": 250002, "max_position_embeddings": 8194}
    | {"type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "ModernBERT-base": {
        "model_type": "modernbert",
        "num_hidden_layers": 22,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_attention_heads": 12,
        "vocab_size": 50368,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "local_attention": 128,
    },
    "gte-multilingual-base": ENCODER
    | {"model_type": "new", "num_hidden_layers": 12, "hidden_size": 768, "vocab_size": 250048}
    | {"intermediate_size": 3072, "num_attention_heads": 12, "position_embedding_type": "rope"}
    | {"rope_theta": 20000, "rope_scaling": {"factor": 8.0, "type": "ntk"}},
}
