"""Real model shapes without weights: `--model shape:qwen2.5-7b` of a benchmark, with random weights
of that shape.

    python -m benchmarks.shapes qwen2.5-7b DIR

writes DIR/qwen2.5-7b with a config.json and a tokenizer of as many words as the model has tokens,
for a server: `python -m jaxllm.server --model DIR/qwen2.5-7b --load-format dummy`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

PREFIX = "shape:"

QWEN = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "max_position_embeddings": 32768,
}
LLAMA_3 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "bos_token_id": 128000,
    "eos_token_id": 128009,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
# Attention, router, token table and head are plain numbers of 16 bits
GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        **QWEN,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "vocab_size": 152064,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
    "llama-3.1-8b": {
        **LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-3.1-70b": {
        **LLAMA_3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **QWEN,
        "max_position_embeddings": 40960,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "vocab_size": 151936,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **QWEN,
        "max_position_embeddings": 40960,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "vocab_size": 151936,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "bos_token_id": 100000,
        "eos_token_id": 100001,
        "max_position_embeddings": 163840,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_hidden_layers": 27,
        "vocab_size": 102400,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {**GPT_OSS, "num_local_experts": 32, "num_hidden_layers": 24},
    "gpt-oss-120b": {**GPT_OSS, "num_local_experts": 128, "num_hidden_layers": 36},
    "gemma2-9b": {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "max_position_embeddings": 8192,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "vocab_size": 256000,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "phi3-mini": {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "bos_token_id": 1,
        "eos_token_id": 32000,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "vocab_size": 32064,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 2047,
    },
    "llama-3.2-1b": {
        **LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "bge-base-en-v1.5": {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "vocab_size": 30522,
        "num_attention_heads": 12,
    },
    "bge-m3": {
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaModel"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8194,
        "type_vocab_size": 1,
        "bos_token_id": 0,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "vocab_size": 250002,
        "num_attention_heads": 16,
    },
    "modernbert-base": {
        "model_type": "modernbert",
        "architectures": ["ModernBertModel"],
        "hidden_activation": "gelu",
        "norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "bos_token_id": 50281,
        "eos_token_id": 50282,
        "pad_token_id": 50283,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "vocab_size": 50368,
        "num_attention_heads": 12,
    },
    "tiny": {  # for trying a benchmark out
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 4096,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
SHAPES["qwen3-embedding-0.6b"] = SHAPES["qwen3-0.6b"] | {"vocab_size": 151669}
ALWAYS = {"hidden_act": "silu", "torch_dtype": "bfloat16"}  # unless a shape says otherwise


def engine_options(model: str) -> dict[str, Any]:
    """Arguments of `LLM` for a benchmark's `--model`: a shape gets random weights and no tokenizer,
    everything else is a model."""
    if not model.startswith(PREFIX):
        return {"model": model}
    directory = write(model.removeprefix(PREFIX), Path(tempfile.gettempdir()) / "jaxllm-shapes")
    return {"model": str(directory), "load_format": "dummy", "skip_tokenizer_init": True}


def write(name: str, root: Path) -> Path:
    """root/name with the shape's config.json. Raises SystemExit on a name that is none."""
    if name not in SHAPES:
        raise SystemExit(f"there is no shape {name!r}; one of {', '.join(SHAPES)}")
    directory = root / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(ALWAYS | SHAPES[name], indent=1))
    return directory


def write_tokenizer(directory: Path) -> None:
    """A tokenizer whose token number n is the word "tn", so that a server with random weights can
    stream text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    count = json.loads((directory / "config.json").read_text())["vocab_size"]
    vocabulary = {f"t{n}": n for n in range(3, count)} | {"<unk>": 0, "<s>": 1, "</s>": 2}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(directory / "tokenizer.json"))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "eos_token": "</s>",
        "model_max_length": 100_000,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(options))


def main() -> None:
    """Write a shape's directory and print its path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("root", type=Path)
    a = parser.parse_args()
    directory = write(a.shape, a.root)
    write_tokenizer(directory)
    print(directory)


if __name__ == "__main__":
    main()
