"""What the goldens of pooling models cover: tiny checkpoints, each with the files that say how it
pools."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PROMPT_LENGTHS = (1, 7, 40, 150)

_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 200,
    "type_vocab_size": 2,
    "pad_token_id": 1,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
}
_ONE_LABEL: dict[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_LABELS: dict[str, Any] = {
    "id2label": {"0": "bad", "1": "fair", "2": "good"},
    "label2id": {"bad": 0, "fair": 1, "good": 2},
}
_MODERN: dict[str, Any] = {
    "model_type": "modernbert",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 200,
    "local_attention": 16,
    "global_attn_every_n_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}


def _modules(*kinds: str) -> list[dict[str, Any]]:
    """`modules.json` of sentence-transformers."""
    return [
        {
            "idx": index,
            "name": str(index),
            "path": "" if kind == "Transformer" else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]


# Case → its JSON files by path; dense modules get random weights
CASES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "qwen3-embedding": {
            "config.json": _BASE
            | {
                "model_type": "qwen3",
                "architectures": ["Qwen3Model"],
                "head_dim": 8,
                "is_matryoshka": True,
            },
            "modules.json": _modules("Transformer", "Pooling", "Normalize"),
            "1_Pooling/config.json": {
                "word_embedding_dimension": 32,
                "pooling_mode_cls_token": False,
                "pooling_mode_mean_tokens": False,
                "pooling_mode_lasttoken": True,
                "include_prompt": True,
            },
        },
        "llama-mean-dense": {
            "config.json": _BASE | {"model_type": "llama", "architectures": ["LlamaModel"]},
            "modules.json": _modules("Transformer", "Pooling", "Dense"),
            "1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": ["cls", "mean"]},
            "2_Dense/config.json": {
                "in_features": 64,
                "out_features": 24,
                "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh",
            },
        },
        "gemma3_text-both-ways": {
            "config.json": _BASE
            | {
                "model_type": "gemma3_text",
                "architectures": ["Gemma3TextModel"],
                "hidden_activation": "gelu_pytorch_tanh",
                "head_dim": 12,
                "query_pre_attn_scalar": 12,
                "sliding_window": 16,
                "sliding_window_pattern": 2,
                "use_bidirectional_attention": True,
            },
            "modules.json": _modules("Transformer", "Pooling", "Dense", "Dense", "Normalize"),
            "1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": "mean"},
            "2_Dense/config.json": {
                "in_features": 32,
                "out_features": 40,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
            "3_Dense/config.json": {
                "in_features": 40,
                "out_features": 32,
                "bias": False,
                "activation_function": "torch.nn.modules.activation.GELU",
            },
        },
        "qwen2-both-ways": {
            "config.json": _BASE
            | {
                "model_type": "qwen2",
                "architectures": ["Qwen2Model"],
                "is_causal": False,
                "use_sliding_window": True,
                "sliding_window": 20,
                "max_window_layers": 1,
                "max_position_embeddings": 64,
                "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
            },
            "modules.json": _modules("Transformer", "Pooling", "Normalize"),
            "1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": "lasttoken"},
        },
        "bert-mean": {
            "config.json": _ENCODER | {"model_type": "bert", "architectures": ["BertModel"]},
            "modules.json": _modules("Transformer", "Pooling", "Normalize"),
            "1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": "mean"},
        },
        "bert-pairs": {
            "config.json": _ENCODER
            | _ONE_LABEL
            | {"model_type": "bert", "architectures": ["BertForSequenceClassification"]},
        },
        "roberta-labels": {
            "config.json": _ENCODER
            | _LABELS
            | {
                "model_type": "roberta",
                "architectures": ["RobertaForSequenceClassification"],
                "type_vocab_size": 1,
                "num_hidden_layers": 1,
            },
        },
        "xlm-roberta-reranker": {
            "config.json": _ENCODER
            | _ONE_LABEL
            | {
                "model_type": "xlm-roberta",
                "architectures": ["XLMRobertaForSequenceClassification"],
                "type_vocab_size": 1,
            },
        },
        "gte-labels": {
            "config.json": _ENCODER
            | _LABELS
            | {
                "model_type": "gte",
                "architectures": ["GteForSequenceClassification"],
                "num_hidden_layers": 1,
                "type_vocab_size": 1,
            },
        },
        "nomic-bert-mean": {
            "config.json": _ENCODER
            | {"model_type": "nomic_bert", "architectures": ["NomicBertModel"]}
            | {"hidden_act": "silu"},
            "modules.json": _modules("Transformer", "Pooling", "Normalize"),
            "1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": "mean"},
        },
        "nomic-bert-labels": {
            "config.json": _ENCODER
            | _LABELS
            | {
                "model_type": "nomic_bert",
                "architectures": ["NomicBertForSequenceClassification"],
                "num_hidden_layers": 1,
                "hidden_act": "silu",
            },
        },
        "eurobert-mean": {
            "config.json": _BASE | {"model_type": "eurobert", "architectures": ["EuroBertModel"]},
            "modules.json": _modules("Transformer", "Pooling"),
            "1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": "mean"},
        },
        "eurobert-labels": {
            "config.json": _BASE
            | _LABELS
            | {
                "model_type": "eurobert",
                "architectures": ["EuroBertForSequenceClassification"],
                "classifier_pooling": "bos",
                "num_hidden_layers": 1,
                "attention_bias": True,
                "mlp_bias": True,
            },
        },
        "eurobert-late": {
            "config.json": _BASE
            | _LABELS
            | {
                "model_type": "eurobert",
                "architectures": ["EuroBertForSequenceClassification"],
                "num_hidden_layers": 1,
            },
        },
        "modernbert-cls": {
            "config.json": _MODERN | {"architectures": ["ModernBertModel"]},
            "modules.json": _modules("Transformer", "Pooling"),
            "1_Pooling/config.json": {"embedding_dimension": 32, "pooling_mode": ["cls", "mean"]},
        },
        "modernbert-reranker": {
            "config.json": _MODERN
            | _ONE_LABEL
            | {
                "architectures": ["ModernBertForSequenceClassification"],
                "classifier_pooling": "mean",
            },
        },
        "bert-token-labels": {
            "config.json": _ENCODER
            | _LABELS
            | {
                "model_type": "bert",
                "architectures": ["BertForTokenClassification"],
                "num_hidden_layers": 1,
            },
        },
        "modernbert-token-labels": {
            "config.json": _MODERN
            | _LABELS
            | {"architectures": ["ModernBertForTokenClassification"], "num_hidden_layers": 2},
        },
        "qwen2-token-labels": {
            "config.json": _BASE
            | _LABELS
            | {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForTokenClassification"],
                "num_hidden_layers": 1,
            },
        },
        "qwen2-classifier": {
            "config.json": _BASE
            | _LABELS
            | {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForSequenceClassification"],
            }
        },
        "qwen3-logit-score": {
            "config.json": _BASE
            | {
                "model_type": "qwen3",
                "architectures": ["Qwen3ForCausalLM"],
                "head_dim": 8,
                "tie_word_embeddings": False,
            },
            "modules.json": _modules("Transformer", "LogitScore"),
            "1_LogitScore/config.json": {"true_token_id": 40, "false_token_id": 50},
        },
        "qwen3-reranker": {
            "config.json": _BASE
            | {
                "model_type": "qwen3",
                "architectures": ["Qwen3ForSequenceClassification"],
                "head_dim": 8,
                "id2label": {"0": "LABEL_0"},
                "label2id": {"LABEL_0": 0},
            }
        },
    }
)
