"""What dense transformer families share: the spec of their configuration, the decoder around their
attention, and the tensor names that Llama introduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxllm.cache.layer import PagedKV
from jaxllm.config import ConfigError
from jaxllm.models.config.read import (
    Config,
    eos_token_ids,
    flag,
    kv_cache_dtype,
    positive,
    stored_dtype,
)
from jaxllm.models.config.rope import context_length, rope, rope_parameters
from jaxllm.models.config.spec import ModelSpec
from jaxllm.nn.attention import Attention
from jaxllm.nn.decoder import Block, Decoder
from jaxllm.nn.linear import Embedding, Init, Linear, vocab_axis
from jaxllm.nn.mlp import ACTIVATIONS, FeedForward, GatedMLP
from jaxllm.nn.norm import RMSNorm

MAX_HEAD_DIM = 2**14  # a frequency is computed for each pair

# Module of the decoder → checkpoint tensors without ".weight" and ".bias"; {} is a layer's number
LLAMA_NAMES: Mapping[str, tuple[str, ...]] = {
    "embed": ("model.embed_tokens",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
    "layers.{}.attention_norm": ("model.layers.{}.input_layernorm",),
    "layers.{}.attention.qkv": (
        "model.layers.{}.self_attn.q_proj",
        "model.layers.{}.self_attn.k_proj",
        "model.layers.{}.self_attn.v_proj",
    ),
    "layers.{}.attention.q_norm": ("model.layers.{}.self_attn.q_norm",),
    "layers.{}.attention.k_norm": ("model.layers.{}.self_attn.k_norm",),
    "layers.{}.attention.out": ("model.layers.{}.self_attn.o_proj",),
    "layers.{}.mlp_norm": ("model.layers.{}.post_attention_layernorm",),
    "layers.{}.mlp.gate_up": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
    "layers.{}.mlp.down": ("model.layers.{}.mlp.down_proj",),
}


def transformer_spec(
    hf: Config, window: Callable[[int], int | None] = lambda layer: None
) -> ModelSpec:
    """The spec of a complete configuration; `window` says how many tokens a layer sees.

    Raises ConfigError when a value is missing or cannot work.
    """
    query, width = positive(hf, "num_attention_heads"), positive(hf, "hidden_size")
    kv = query if hf.get("num_key_value_heads") is None else positive(hf, "num_key_value_heads")
    dim = width // query if hf.get("head_dim") is None else positive(hf, "head_dim")
    if not 2 <= dim <= MAX_HEAD_DIM or dim % 2:
        raise ConfigError(
            f"config.json: head_dim is {dim}; rotary embedding needs a positive even number, "
            f"at most {MAX_HEAD_DIM}"
        )
    activation = hf.get("hidden_act")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: hidden_act {activation!r:.80} is not supported "
            f"(supported: {', '.join(sorted(ACTIVATIONS))})"
        )
    eps = hf.get("rms_norm_eps")
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ConfigError(
            f"config.json: rms_norm_eps is {eps!r:.80}; it must be a number from 0 to 1"
        )
    dynamic = rope_parameters(hf)["rope_type"] == "dynamic"
    return ModelSpec(
        model_type=hf["model_type"],
        vocab_size=positive(hf, "vocab_size"),
        width=width,
        inner_width=positive(hf, "intermediate_size"),
        query_heads=query,
        layers=tuple(
            PagedKV(kv, dim, dim, window(layer))
            for layer in range(positive(hf, "num_hidden_layers"))
        ),
        rope=rope(hf, dim),
        context_length=context_length(hf),
        shared_length=positive(hf, "max_position_embeddings") if dynamic else None,
        eos_token_ids=tuple(sorted(eos_token_ids(hf))),
        stored_dtype=stored_dtype(hf),
        kv_cache_dtype=kv_cache_dtype(hf.get("quantization_config")) or "auto",
        tied=flag(hf, "tie_word_embeddings"),
        norm_eps=float(eps),
        activation=activation,
        config=hf,
    )


def transformer(
    spec: ModelSpec,
    shards: int,
    init: Init,
    attention: Callable[[int], Attention],
    *,
    mlp_bias: bool = False,
    mlp: Callable[[int], FeedForward] | None = None,
) -> Decoder:
    """Embedding, pre-norm blocks around `attention(layer)` and `mlp(layer)`, norm and head.

    Without `mlp`, feed-forwards are gated and of the spec's width. Raises ConfigError when they do
    not divide over the shards.
    """
    width, inner, vocab, eps = spec.width, spec.inner_width, spec.vocab_size, spec.norm_eps
    if mlp is None and inner % shards:
        raise ConfigError(
            f"intermediate_size {inner} does not divide over {shards} tensor shards; "
            "choose another tensor_parallel_size"
        )

    def block(layer: int) -> Block:
        return Block(
            attention_norm=RMSNorm(init, width, eps),
            attention=attention(layer),
            mlp_norm=RMSNorm(init, width, eps),
            mlp=GatedMLP(init, width, inner, shards, spec.activation, mlp_bias)
            if mlp is None
            else mlp(layer),
        )

    return Decoder(
        embed=Embedding(init, vocab, width, shards),
        layers=[block(layer) for layer in range(len(spec.layers))],
        norm=RMSNorm(init, width, eps),
        head=None
        if spec.tied
        else Linear(init, (vocab,), (width,), (vocab_axis(vocab, shards), "embed")),
        rope=spec.rope,
    )


def layer_window(hf: Config) -> Callable[[int], int | None]:
    """The sliding window of each layer where `layer_types`, or `use_sliding_window` with
    `max_window_layers`, decide it. Raises ConfigError when they contradict each other."""
    layers, types = positive(hf, "num_hidden_layers"), hf.get("layer_types")
    window = (
        positive(hf, "sliding_window")
        if flag(hf, "use_sliding_window") and hf.get("sliding_window") is not None
        else None
    )
    if types is None:
        first = hf.get("max_window_layers", layers)
        if window is not None and type(first) is not int:
            raise ConfigError(
                f"config.json: max_window_layers is {first!r:.80}; it must be an integer"
            )
        return lambda layer: window if window is not None and layer >= first else None
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
        raise ConfigError(
            f"config.json: layer_types must be {layers} times 'full_attention' or "
            "'sliding_attention'"
        )
    if window is None and "sliding_attention" in types:
        raise ConfigError(
            "config.json: layer_types has sliding_attention, "
            "which needs use_sliding_window and sliding_window"
        )
    return lambda layer: window if types[layer] == "sliding_attention" else None
