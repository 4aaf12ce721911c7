"""SmolLM3: Llama whose every fourth layer knows no positions."""

from __future__ import annotations

from dataclasses import replace

from jaxllm.config import ConfigError
from jaxllm.models import llama
from jaxllm.models.config.read import Config, flag, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.models.config.transformer import FULL, SLIDING, layer_window, transformer_spec, typed
from jaxllm.nn.rope import NoRope

DEFAULTS: Config = {
    **llama.DEFAULTS,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "rope_theta": 2000000.0,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}
NAMES = llama.NAMES
build = llama.build


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    turns = _turning(hf)
    windows = flag(hf, "use_sliding_window") and hf.get("sliding_window") is not None
    hf = typed(hf, lambda layer: SLIDING if windows and not turns[layer] else FULL)
    plain = transformer_spec(hf, layer_window(hf))
    still = NoRope(plain.heads(1).dim // 2)
    ropes = (rope if turn else still for rope, turn in zip(plain.ropes, turns, strict=True))
    return replace(plain, ropes=tuple(ropes))


def _turning(hf: Config) -> list[bool]:
    """Whether each layer has RoPE, which `no_rope_layers` says with a 1."""
    layers = positive(hf, "num_hidden_layers")
    switches = hf.get("no_rope_layers")
    if switches is None:
        every = positive(hf, "no_rope_layer_interval")
        return [bool((layer + 1) % every) for layer in range(layers)]
    if (
        not isinstance(switches, list)
        or len(switches) != layers
        or any(switch not in (0, 1) for switch in switches)
    ):
        raise ConfigError(f"config.json: no_rope_layers must be {layers} times 0 or 1")
    return [bool(switch) for switch in switches]
