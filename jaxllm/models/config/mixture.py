"""What families with mixtures of experts share: sizes, tensor names and the routed feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxllm.config import ConfigError
from jaxllm.models.config.read import Config, flag, number, positive, whole
from jaxllm.models.config.spec import Mixture, ModelSpec
from jaxllm.models.config.transformer import Parts
from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.experts import Experts, MixtureMLP, Split
from jaxllm.nn.mixture.routers import GroupLimit, Router, Routing, normalised, unchanged
from jaxllm.nn.mlp import FeedForward, GatedMLP

MAX_EXPERTS = 2**14  # each has names of its own
# in mlp_layer_types
DENSE = "dense"
SPARSE = "sparse"
FUSED = ("gate_up_proj", "down_proj")  # of all experts, as newer checkpoints may hold them


def mixture(hf: Config, experts: str, inner: str, choices: str = "num_experts_per_tok") -> Mixture:
    """The sizes under these keys of a complete configuration. Raises ConfigError."""
    sizes = Mixture(positive(hf, experts), positive(hf, choices), positive(hf, inner))
    if sizes.choices > sizes.experts:
        raise ConfigError(
            f"config.json: {choices} is {sizes.choices}, but {experts} is {sizes.experts}; "
            "a token cannot choose more experts than there are"
        )
    if sizes.experts > MAX_EXPERTS:
        raise ConfigError(
            f"config.json: {experts} is {sizes.experts}; at most {MAX_EXPERTS} are supported"
        )
    return sizes


def mixture_spec(spec: ModelSpec, sizes: Mixture) -> ModelSpec:
    """The spec of a dense model, with such mixtures. A token's rows are copied for each expert that
    it chooses."""
    copies = sizes.choices * (sizes.inner + spec.width)
    return replace(spec, inner_width=max(spec.inner_width, copies), mixture=sizes)


def sparse_layers(hf: Config) -> frozenset[int]:
    """Layers with a mixture where `mlp_only_layers` and `decoder_sparse_step` decide it. Raises
    ConfigError."""
    dense = hf.get("mlp_only_layers") or []
    layers = positive(hf, "num_hidden_layers")
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ConfigError(
            f"config.json: mlp_only_layers is {dense!r:.80}; it must be a list of layers' numbers"
        )
    step = positive(hf, "decoder_sparse_step")
    return frozenset(range(step - 1, layers, step)) - frozenset(dense)


def dense_layers(hf: Config) -> frozenset[int]:
    """Layers without a mixture where `mlp_layer_types`, or else `first_k_dense_replace`, decides
    it. Raises ConfigError."""
    layers = positive(hf, "num_hidden_layers")
    types = hf.get("mlp_layer_types")
    if types is None:
        return frozenset(range(min(whole(hf, "first_k_dense_replace"), layers)))
    known = isinstance(types, list) and all(name in (DENSE, SPARSE) for name in types)
    if not known or len(types) != layers:
        raise ConfigError(
            f"config.json: mlp_layer_types must be {layers} times '{DENSE}' or '{SPARSE}'"
        )
    return frozenset(layer for layer, name in enumerate(types) if name == DENSE)


def group_limit(hf: Config, experts: int, best: int) -> GroupLimit | None:
    """The limit by `n_group` and `topk_group`; None where there is one group.

    Raises ConfigError.
    """
    groups = positive(hf, "n_group")
    kept = positive(hf, "topk_group")
    if experts % groups or kept > groups or best * groups > experts:
        raise ConfigError(
            f"config.json: n_group is {groups} and topk_group {kept}; {experts} experts must "
            f"divide into groups of at least {best}, of which topk_group stay"
        )
    choices = positive(hf, "num_experts_per_tok")
    left = kept * (experts // groups)
    if choices > left:
        raise ConfigError(
            f"config.json: num_experts_per_tok is {choices}, but topk_group leaves {left} experts "
            "to choose from"
        )
    if groups == 1:
        return None
    return GroupLimit(groups, kept, best)


def sigmoid_routing(hf: Config, experts: int) -> dict[str, Any]:
    """Fields of `nn.routers.Routing` as DeepSeek-V3 introduced them: sigmoids as scores, with a
    correction to choose by, within the best groups. Raises ConfigError."""
    return {
        "score": jax.nn.sigmoid,
        "weigh": normalised if flag(hf, "norm_topk_prob") else unchanged,
        "scale": number(hf, "routed_scaling_factor"),
        "limit": group_limit(hf, experts, best=2),
        "corrected": True,
    }


def sigmoid_mixtures(parts: Parts, sizes: Mixture, shared: int) -> Callable[[int], FeedForward]:
    """The feed-forward of each layer: dense by `dense_layers`, else a mixture by `sigmoid_routing`
    with this many shared experts. Raises ConfigError."""
    spec = parts.spec
    hf = parts.spec.config
    dense = dense_layers(parts.spec.config)

    def gated(inner: int) -> GatedMLP:
        return GatedMLP(parts.init, spec.width, inner, parts.shards, spec.activation)

    def feed_forward(layer: int) -> FeedForward:
        if layer in dense:
            return gated(positive(hf, "intermediate_size"))
        beside = None
        if shared:
            beside = gated(sizes.inner * shared)
        routing = sigmoid_routing(hf, sizes.experts)
        return routed(spec, parts.shards, parts.init, sizes, beside, **routing)

    return feed_forward


def shared_experts(hf: Config, key: str = "n_shared_experts") -> int:
    """How many experts compute every token; null and 0 are none. Raises ConfigError."""
    if hf.get(key) is None:
        return 0
    return whole(hf, key)


def predicting_layers(spec: ModelSpec) -> tuple[str, ...]:
    """The prefixes of names of tensors in layers that predict further tokens, which are numbered
    behind the model's own. Raises ConfigError."""
    layers = positive(spec.config, "num_hidden_layers")
    extra = whole(spec.config, "num_nextn_predict_layers")
    return tuple(f"model.layers.{layers + layer}." for layer in range(extra))


def shared_names(name: str) -> Mapping[str, tuple[str, ...]]:
    """Modules of a shared gated feed-forward → the checkpoint tensors of a layer's `name`."""
    prefix = f"model.layers.{{}}.{name}"
    return {
        "layers.{}.mlp.shared.gate_up": (f"{prefix}.gate_proj", f"{prefix}.up_proj"),
        "layers.{}.mlp.shared.down": (f"{prefix}.down_proj",),
    }


def mixture_names(
    block: str = "mlp",
    router: tuple[str, ...] = ("gate.weight",),
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Mapping[str, tuple[str, ...]]:
    """Modules of a `MixtureMLP` → checkpoint tensors of a layer's `block`: those of the router, and
    `parts` of each expert, or fused ones of all experts under the names of newer checkpoints."""
    layer = "model.layers.{}"
    gate, up, down = (f"{layer}.{block}.experts.{{{{}}}}.{part}.weight" for part in parts)
    fused_gate_up, fused_down = (f"{layer}.mlp.experts.{name}" for name in FUSED)
    spellings = [
        f"{layer}.{module}.{name}" for module in dict.fromkeys((block, "mlp")) for name in router
    ]
    return {
        "layers.{}.mlp.router": tuple(spellings),
        "layers.{}.mlp.experts.gate_up": (gate, up, fused_gate_up),
        "layers.{}.mlp.experts.down": (down, fused_down),
    }


def expert_split(spec: ModelSpec, shards: int) -> Split:
    """How experts lie on `shards` devices. Raises ConfigError where their width does not divide."""
    assert spec.mixture is not None
    split = Split(spec.expert_groups, shards // spec.expert_groups)
    if spec.mixture.inner % split.shards:
        raise ConfigError(
            f"experts of width {spec.mixture.inner} do not divide over {split.shards} devices; "
            "set a larger --expert-parallel-size, or a smaller --tensor-parallel-size"
        )
    return split


def routed(
    spec: ModelSpec,
    shards: int,
    init: Init,
    sizes: Mixture,
    shared: FeedForward | None = None,
    *,
    router: type[Router] = Router,
    router_init: Init | None = None,
    **routing: Any,
) -> MixtureMLP:
    """A routed feed-forward; `routing` are fields of `nn.routers.Routing`, and `router_init` makes
    the router's weight where that has a type of its own.

    Raises ConfigError where experts do not divide over the shards.
    """
    split = expert_split(spec, shards)
    activation = spec.activation
    return MixtureMLP(
        router(router_init or init, spec.width, sizes.experts, Routing(sizes.choices, **routing)),
        Experts.plain(init, sizes.experts, spec.width, sizes.inner, activation, split),
        shared,
    )
