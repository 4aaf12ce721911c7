"""The keys of config.json that most architectures have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.config import ConfigError
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.model import Model

# Texts of tokens that end an answer, where the file names one end alone
ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eom_id|>")
HARMONY = ("<|return|>", "<|call|>")  # beside which <|end|> ends a message, not the answer
THETA = 10_000.0  # without a key, whatever the family
# Of each of these, one is there
NEEDED = (
    ("context_length",),
    ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
)
CONTROL = 3  # type of a token
KINDS = ("none", "linear", "yarn", "longrope")  # of scaled positions


def base_config(model: Model, model_type: str, **others: Any) -> dict[str, Any]:
    """The configuration of a decoder, `others` among it; what is None is left out. Values are
    checked where the configuration is read. Raises ConfigError where a key is missing for which a
    family's usual value could be another model's."""
    metadata = model.metadata
    _check_needed(metadata)
    dim, key, value = (
        metadata.count(f"attention.{part}_length") for part in ("head", "key", "value")
    )
    embedding = model.tensors.get("token_embd.weight")
    heads = metadata.count("attention.head_count")
    base = metadata.number("rope.freq_base")
    settings: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [],
        "dtype": "bfloat16",
        "vocab_size": embedding.shape[0] if embedding else metadata.count("vocab_size"),
        "hidden_size": metadata.count("embedding_length"),
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv") or heads,
        "head_dim": dim or key or value,
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": THETA if base is None else base,
        "rope_scaling": scaling(metadata),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "bos_token_id": metadata.count(".tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(metadata) or None,
    }
    return {key: value for key, value in (settings | others).items() if value is not None}


def _check_needed(metadata: Metadata) -> None:
    needed = (*NEEDED, ("expert_used_count",)) if metadata.get("expert_count") else NEEDED
    missing = [keys[0] for keys in needed if all(metadata.get(key) is None for key in keys)]
    if missing:
        names = " and ".join(f"{metadata.architecture}.{key}" for key in missing)
        raise ConfigError(f"the file lacks {names}; convert the model again")


def scaling(metadata: Metadata) -> dict[str, Any] | None:
    """The `rope_scaling` that the keys say, None for none. Files from before there were kinds have
    a factor alone, which is linear."""
    rope_type = metadata.text("rope.scaling.type") or "linear"
    factor = metadata.number("rope.scaling.factor")
    if rope_type not in KINDS:
        raise ConfigError(
            f"{metadata.architecture}.rope.scaling.type is {rope_type!r:.40}; "
            f"{', '.join(KINDS)} are read: convert the model again"
        )
    if factor is None and rope_type == "linear":
        factor = metadata.number("rope.scale_linear")
    if rope_type not in ("linear", "yarn") or factor is None:
        return None
    original = metadata.count("rope.scaling.original_context_length")
    betas = {key: metadata.number(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
    if rope_type != "linear":
        more = {"original_max_position_embeddings": original, **betas}
    else:
        more = {}
    return {"rope_type": rope_type, "factor": factor, **{k: v for k, v in more.items() if v}}


def factors(model: Model, name: str) -> list[float] | None:
    """A small tensor of factors of frequencies, None where there is none."""
    tensor = model.tensors.get(name)
    if tensor is None:
        return None
    numbers = np.asarray(tensor.deferred()).reshape(-1)
    return [float(str(number)) for number in numbers]


def long_rope(model: Model, short: str, long: str, **others: Any) -> dict[str, Any] | None:
    """`rope_scaling` by tensors of factors for short and for long texts; None without them."""
    tables = {"short_factor": factors(model, short), "long_factor": factors(model, long)}
    if None in tables.values():
        return None
    return {"rope_type": "longrope", **tables, **others}


def stretched(model: Model) -> dict[str, Any]:
    """`rope_scaling` where the file keeps Llama 3's frequencies as factors."""
    rope = long_rope(
        model,
        "rope_freqs.weight",
        "rope_freqs.weight",
        attention_factor=1.0,
        original_max_position_embeddings=model.metadata.count("context_length"),
    )
    if rope is None:
        return {}
    return {"rope_scaling": rope}


def turning_share(metadata: Metadata) -> float | None:
    """The part of a head's dimensions that turn, None where the file does not say."""
    turning = metadata.count("rope.dimension_count")
    dim = metadata.count("attention.key_length")
    width = metadata.count("embedding_length")
    heads = metadata.count("attention.head_count")
    dim = dim or (width // heads if width and heads else None)
    if turning and dim:
        return turning / dim
    return None


def routed_experts(metadata: Metadata) -> dict[str, Any]:
    """Experts under the names of DeepSeek's configurations."""
    return {
        "n_routed_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "n_shared_experts": metadata.count("expert_shared_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "first_k_dense_replace": metadata.count("leading_dense_block_count"),
        "routed_scaling_factor": metadata.number("expert_weights_scale"),
        "norm_topk_prob": metadata.flag("expert_weights_norm"),
    }


def layer_types(slides: Sequence[Any]) -> list[str]:
    """The `layer_types` of layers that slide, or see all."""
    return [f"{'sliding' if slide else 'full'}_attention" for slide in slides]


def end_ids(metadata: Metadata) -> list[int]:
    """Ids of the tokens that end an answer."""
    stated = (metadata.count(f".tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    ids = {id for id in stated if id is not None}
    tokens = metadata.items(".tokenizer.ggml.tokens", str) or []
    kinds = metadata.items(".tokenizer.ggml.token_type", int) or []
    control = {
        tokens[id]: id
        for id, token_type in enumerate(kinds[: len(tokens)])
        if token_type == CONTROL
    }
    harmony = all(text in control for text in HARMONY)
    texts = HARMONY if harmony else ENDS
    return sorted(ids | {control[text] for text in texts if text in control})


def sampling(metadata: Metadata) -> Mapping[str, Any]:
    """Options of generation_config.json."""
    keys = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
    values = {name: metadata.number(f".general.sampling.{key}") for name, key in keys.items()}
    return {name: value for name, value in values.items() if value is not None}
