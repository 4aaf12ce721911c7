"""What dense transformer families share: the spec of their configuration, the decoder around their
attention, and the tensor names that Llama introduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxllm.cache.layer import PagedKV
from jaxllm.config import ConfigError
from jaxllm.models.config.quantisation import kv_cache_dtype
from jaxllm.models.config.read import (
    Config,
    eos_token_ids,
    flag,
    positive,
    stored_dtype,
)
from jaxllm.models.config.rope import context_length, layer_ropes, turning_dims
from jaxllm.models.config.spec import ModelSpec
from jaxllm.nn.attention import Attention, Scoring
from jaxllm.nn.blocks import Block, ParallelBlock
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import Embedding, LogitsBias, PositionedEmbedding, vocab_axis
from jaxllm.nn.head_maps import HeadMap
from jaxllm.nn.heads import Heads
from jaxllm.nn.linear import Init, Linear, OutputHead
from jaxllm.nn.logits import LogitsMap
from jaxllm.nn.mlp import ACTIVATIONS, MLP, FeedForward, GatedMLP, check_inner
from jaxllm.nn.norm import Norm, RMSNorm
from jaxllm.nn.rope import DynamicRope, NoRope, Rope, rotary_order

# Of models that also see: where the language model's tensors lie, and those of the other parts
WRAPPER_PREFIXES: Mapping[str, str | None] = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    **dict.fromkeys(
        f"{outer}{part}."
        for outer in ("", "model.")
        for part in ("vision_tower", "multi_modal_projector", "visual", "embed_vision")
    ),
}
# in layer_types
FULL = "full_attention"
SLIDING = "sliding_attention"
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


def checked_types(hf: Config) -> list[str] | None:
    """The type of each layer by `layer_types`, None where they are not given. Raises ConfigError
    for another number of them, or others."""
    layers = positive(hf, "num_hidden_layers")
    types = hf.get("layer_types")
    if types is not None and (
        not isinstance(types, list)
        or len(types) != layers
        or any(name not in (FULL, SLIDING) for name in types)
    ):
        raise ConfigError(
            f"config.json: layer_types must be {layers} times 'full_attention' or "
            "'sliding_attention'"
        )
    return types


def typed(hf: Config, usual: Callable[[int], str]) -> Config:
    """The configuration with `layer_types`, where they are missing by `usual(layer)`."""
    if hf.get("layer_types") is not None:
        return hf
    layers = positive(hf, "num_hidden_layers")
    return {**hf, "layer_types": [usual(layer) for layer in range(layers)]}


def type_window(hf: Config) -> Callable[[int], int | None]:
    """`sliding_window` for the layers that `layer_types` calls sliding, None for the others.

    Raises ConfigError.
    """
    types = checked_types(hf) or []
    window = None
    if SLIDING in types:
        window = positive(hf, "sliding_window")
    return lambda layer: window if types[layer] == SLIDING else None


def transformer_spec(
    hf: Config,
    window: Callable[[int], int | None] = lambda layer: None,
    *,
    partial: bool = False,
    paired: bool = False,
    still: bool = False,
) -> ModelSpec:
    """The spec of a complete configuration.

    Args:
        window: tokens that a layer sees.
        partial: the family reads `partial_rotary_factor`.
        paired: dimensions 2i and 2i + 1 of a head turn together, not i and i + half.
        still: heads do not turn, so that they may be of odd width.

    Raises ConfigError when a value is missing or cannot work.
    """
    query = positive(hf, "num_attention_heads")
    width = positive(hf, "hidden_size")
    kv = _kv_heads(hf, query)
    dim = _head_dim(hf, query, width, 1 if still else 2)
    turning = dim
    if not still:
        turning = _turning(hf, dim, partial)
    layers = positive(hf, "num_hidden_layers")
    length = context_length(hf)
    types = checked_types(hf) or [FULL] * layers
    pairs = -(-dim // 2)
    if still:
        order: tuple[int, ...] = ()
        ropes: tuple[Rope, ...] = (NoRope(pairs),) * layers
    else:
        order = rotary_order(dim, turning + turning % 2, paired)
        ropes = layer_ropes(hf, dim, turning, types)
    odd = 2 * pairs if dim % 2 else None
    dynamic = any(isinstance(getattr(rope, "turning", rope), DynamicRope) for rope in ropes)
    return ModelSpec(
        model_type=hf["model_type"],
        vocab_size=positive(hf, "vocab_size"),
        width=width,
        inner_width=positive(hf, "intermediate_size"),
        query_heads=query,
        layers=tuple(
            PagedKV(kv, dim, dim, window(layer), order=order, width=odd) for layer in range(layers)
        ),
        context_length=length,
        shared_length=positive(hf, "max_position_embeddings") if dynamic else None,
        eos_token_ids=tuple(sorted(eos_token_ids(hf))),
        stored_dtype=stored_dtype(hf),
        kv_cache_dtype=kv_cache_dtype(hf.get("quantization_config")) or "auto",
        tied=flag(hf, "tie_word_embeddings"),
        norm_eps=_norm_eps(hf),
        activation=_activation(hf),
        ropes=ropes,
        carry_width=width,
        served_length=length,
        config=hf,
    )


def _kv_heads(hf: Config, query: int) -> int:
    """Heads of keys and values: as many as of queries unless the configuration says otherwise."""
    if hf.get("num_key_value_heads") is None:
        return query
    return positive(hf, "num_key_value_heads")


def _turning(hf: Config, dim: int, partial: bool) -> int:
    """Dimensions of a head that rotary positions turn; all, unless the family may turn a part.
    Raises ConfigError."""
    turning = turning_dims(hf, dim)
    if turning != dim and not partial:
        raise ConfigError(
            f"config.json: {hf['model_type']} models turn whole heads; partial_rotary_factor "
            "must be 1"
        )
    return turning


def _head_dim(hf: Config, query: int, width: int, multiple: int) -> int:
    if hf.get("head_dim") is None:
        dim = width // query
    else:
        dim = positive(hf, "head_dim")
    if not 1 <= dim <= MAX_HEAD_DIM or dim % multiple:
        needs = "1 at least"
        if multiple > 1:
            needs = "rotary embedding needs a positive even number"
        raise ConfigError(f"config.json: head_dim is {dim}; {needs}, at most {MAX_HEAD_DIM}")
    return dim


def _activation(hf: Config) -> str:
    activation = hf.get("hidden_act")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: hidden_act {activation!r:.80} is not supported "
            f"(supported: {', '.join(sorted(ACTIVATIONS))})"
        )
    return activation


def _norm_eps(hf: Config) -> float:
    eps = hf.get("rms_norm_eps")
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ConfigError(
            f"config.json: rms_norm_eps is {eps!r:.80}; it must be a number from 0 to 1"
        )
    return float(eps)


class Parts:
    """Makes the parts of one model, each with the sizes of its spec.

    `norm_kind` is the class of its norms. Raises ConfigError when heads or a feed-forward do not
    divide over the shards.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shards: int,
        init: Init,
        norm_kind: Callable[[Init, int, float], Norm] = RMSNorm,
    ):
        self.spec = spec
        self.shards = shards
        self.init = init
        self._norm_kind = norm_kind
        for layer in spec.attention_layers:
            spec.heads(shards, layer)  # so that heads which do not divide are refused at once

    @property
    def heads(self) -> Heads:
        """The attention heads of the first layer that attends."""
        return self.spec.heads(self.shards)

    def norm(self) -> Norm:
        """A norm of the residual stream."""
        return self._norm_kind(self.init, self.spec.width, self.spec.norm_eps)

    def qk_norms(
        self, norm_class: type[RMSNorm] = RMSNorm, layer: int | None = None
    ) -> tuple[RMSNorm, RMSNorm]:
        """Norms of each query head and of each key head of a layer, see `ModelSpec.heads`."""
        heads = self.spec.heads(self.shards, layer)
        dim = heads.stored_dim
        order = heads.key_order
        query, key = (
            norm_class(self.init, dim, self.spec.norm_eps, "head_dim", order) for _ in "qk"
        )
        return query, key

    def attention(
        self,
        layer: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        head_map: HeadMap | None = None,
        **options: Any,
    ) -> Attention:
        """The attention of one layer, with its window; `options` are those of `Attention`."""
        scoring = Scoring(self.spec.layers[layer].window, scale, softcap)
        heads = self.spec.heads(self.shards, layer)
        made = Attention(self.init, heads, self.spec.width, scoring=scoring, **options)
        made.head_map = head_map
        return made

    def gated_mlp(self, bias: bool = False) -> GatedMLP:
        """A gated feed-forward."""
        width = self.spec.width
        activation = self.spec.activation
        return GatedMLP(self.init, width, self.spec.inner_width, self.shards, activation, bias)

    def mlp(self, bias: bool = True) -> MLP:
        """A feed-forward without a gate."""
        check_inner(self.spec.inner_width, self.shards)
        return MLP(self.init, self.spec.width, self.spec.inner_width, self.spec.activation, bias)

    def block(
        self, attention: nnx.Module, mlp: FeedForward, block_class: type[Block] = Block
    ) -> Block:
        """A block around these two with two norms, pre-norm unless `block_class` is another."""
        return block_class(
            attention_norm=self.norm(), attention=attention, mlp_norm=self.norm(), mlp=mlp
        )

    def parallel_block(self, attention: nnx.Module, mlp: FeedForward) -> ParallelBlock:
        """A block of these two beside each other behind one norm."""
        return ParallelBlock(
            attention_norm=self.norm(), attention=attention, mlp_norm=None, mlp=mlp
        )

    def rounded(self, value: float) -> float:
        """A number as the parameters' type holds it."""
        return float(np.asarray(value, jnp.dtype(self.init.dtype)))

    def embedding(self) -> Embedding:
        """The token table."""
        return Embedding(self.init, self.spec.vocab_size, self.spec.width, self.table_axis)

    def positioned(self, first: int = 0, project: Linear | None = None) -> PositionedEmbedding:
        """The token table with learned positions, `max_position_embeddings` of them."""
        length = positive(self.spec.config, "max_position_embeddings")
        sizes = self.spec.vocab_size, self.spec.width, self.table_axis, length
        return PositionedEmbedding(self.init, *sizes, first=first, project=project)

    @property
    def table_axis(self) -> str | None:
        """Logical axis of the token table's vocabulary: only a table that is the head is split."""
        if self.spec.tied:
            return vocab_axis(self.spec.vocab_size, self.shards)
        return None

    def decoder(
        self,
        block: Callable[[int], Block],
        *,
        embed: Embedding | None = None,
        norm: Norm | None = None,
        project: Linear | None = None,
        logits_maps: tuple[LogitsMap, ...] = (),
        head_bias: bool = False,
    ) -> Decoder:
        """The model of one `block(layer)` for each layer; `norm` stands for its final one."""
        spec = self.spec
        vocab = self.spec.vocab_size
        if project is None:
            width = spec.width
        else:
            width = project.out[0]
        axis = vocab_axis(vocab, self.shards)
        bias = None
        if spec.tied and head_bias:
            bias = LogitsBias(self.init, vocab, axis)
        return Decoder(
            embed=self.embedding() if embed is None else embed,
            layers=[block(layer) for layer in range(len(spec.layers))],
            norm=self.norm() if norm is None else norm,
            head=None if spec.tied else OutputHead(self.init, vocab, width, axis, head_bias),
            ropes=spec.ropes,
            logits_maps=logits_maps,
            logits_bias=bias,
            project=project,
        )


def window_start(hf: Config) -> int:
    """`max_window_layers`, by default all of them. Raises ConfigError for no integer."""
    first = hf.get("max_window_layers", positive(hf, "num_hidden_layers"))
    if type(first) is not int:
        raise ConfigError(f"config.json: max_window_layers is {first!r:.80}; it must be an integer")
    return first


def one_window(hf: Config) -> Callable[[int], int | None]:
    """`sliding_window` for every layer, where it is given. Raises ConfigError."""
    window = None
    if hf.get("sliding_window") is not None:
        window = positive(hf, "sliding_window")
    return lambda layer: window


def layer_window(hf: Config) -> Callable[[int], int | None]:
    """The sliding window of each layer where `layer_types`, or `use_sliding_window` with
    `max_window_layers`, decide it. Raises ConfigError when they contradict each other."""
    layers = positive(hf, "num_hidden_layers")
    types = checked_types(hf)
    window = None
    if flag(hf, "use_sliding_window") and hf.get("sliding_window") is not None:
        window = positive(hf, "sliding_window")
    if types is None:
        if window is not None:
            first = window_start(hf)
        else:
            first = layers
        return lambda layer: window if window is not None and layer >= first else None
    if window is None and SLIDING in types:
        raise ConfigError(
            "config.json: layer_types has sliding_attention, "
            "which needs use_sliding_window and sliding_window"
        )
    return lambda layer: window if types[layer] == SLIDING else None
