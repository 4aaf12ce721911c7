"""gpt-oss: attention with sinks and, on every other layer, a window; mixtures of experts with
biases, whose gates are clamped. The published weights are of 4 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.models.config.mixture import expert_split, mixture, mixture_spec
from jaxllm.models.config.read import Config, flag, number, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import (
    FULL,
    LLAMA_NAMES,
    SLIDING,
    Parts,
    transformer_spec,
    type_window,
)
from jaxllm.nn.blocks import Block
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.linear import Init
from jaxllm.nn.mixture.experts import DOWN, UP, ExpertMaps, Experts, MixtureMLP
from jaxllm.nn.mixture.routers import Router, Routing, softmax, unchanged
from jaxllm.nn.rules import Ordered, Piece, Rule, Step, Transposed

SPELLING = {"num_experts": "num_local_experts"}  # transformers reads either
DEFAULTS: Config = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "sliding_window": 128,
    "rope_theta": 150000.0,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
# Where config.json has no settings
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
MLP = "model.layers.{}.mlp"
NAMES = {
    **LLAMA_NAMES,
    "layers.{}.attention.sinks": ("model.layers.{}.self_attn.sinks",),
    "layers.{}.mlp.router": (f"{MLP}.router.weight", f"{MLP}.router.bias"),
    "layers.{}.mlp.experts.gate_up": (f"{MLP}.experts.gate_up_proj",),
    "layers.{}.mlp.experts.down": (f"{MLP}.experts.down_proj",),
}
SIZES = ("num_local_experts", "intermediate_size")


@dataclass(frozen=True)
class ClampedGate:
    """(up + 1) · gate · sigmoid(alpha · gate), of a gate of at most and an up within the limit."""

    alpha: float
    limit: float

    def __call__(self, gate: Array, up: Array) -> Array:
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


class TurnedMaps(ExpertMaps):
    """Maps stored as `[E, in, out]`, with biases; of two parts the outputs alternate."""

    def rules(self, *names: str) -> Iterator[Rule]:
        yield from super().rules(*names)
        (name,) = names
        view = self.shape[:2]
        yield Rule("bias", (Piece(f"{name}_bias", view, view, steps=(self._alternating(view),)),))

    def pieces(self, name: str, leaf: str, columns: int | None) -> tuple[Piece, ...]:
        (piece,) = super().pieces(name, leaf, columns)
        steps: tuple[Step, ...] = (self._alternating(piece.view),)
        if leaf != "weight":  # one that is packed
            return (replace(piece, steps=steps),)
        experts, out, inp = piece.view
        return (replace(piece, source=(experts, inp, out), steps=(Transposed(), *steps)),)

    def _alternating(self, view: tuple[int, ...]) -> Ordered:
        """The outputs in the order of `blocks`, of an array seen as `view`."""
        part = view[1] // self.parts
        rows = (row for block in self.blocks for row in block)
        return Ordered(view, 1, tuple(row % part * self.parts + row // part for row in rows))


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    config = dict(hf)
    layers = positive(hf, "num_hidden_layers")
    if config.get("layer_types") is None:
        config["layer_types"] = [FULL if layer % 2 else SLIDING for layer in range(layers)]
    if not config.get("rope_parameters") and not config.get("rope_scaling"):
        config["rope_parameters"] = ROPE | {"rope_theta": hf["rope_theta"]}
    return mixture_spec(transformer_spec(config, type_window(config)), mixture(hf, *SIZES))


def build(spec: ModelSpec, shards: int, init: Init) -> Decoder:
    """The model with fresh parameters. Raises ConfigError."""
    hf = spec.config
    parts = Parts(spec, shards, init)
    sizes = mixture(spec.config, *SIZES)
    bias = flag(hf, "attention_bias")
    width = spec.width
    split = expert_split(spec, shards)
    routing = Routing(sizes.choices, score=unchanged, weigh=softmax, biased=True)
    gating = ClampedGate(number(hf, "swiglu_alpha"), number(hf, "swiglu_limit"))

    def mlp() -> MixtureMLP:
        experts = sizes.experts
        inner = sizes.inner
        gate_up = TurnedMaps(init, (experts, 2 * inner, width), UP, 2, bias=True, split=split)
        out = TurnedMaps(init, (experts, width, inner), DOWN, bias=True, split=split)
        router = Router(init, width, sizes.experts, routing)
        return MixtureMLP(router, Experts(gate_up, out, gating))

    def block(layer: int) -> Block:
        attention = parts.attention(layer, qkv_bias=bias, out_bias=bias, sinks=True)
        return parts.block(attention, mlp())

    return parts.decoder(block)
