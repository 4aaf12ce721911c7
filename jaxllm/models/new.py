"""GTE as its makers publish it ("new"): fused projections, and a rotary base of its own scaling.

Checkpoints name remote code, which is never run: this file stands for it.
"""

from __future__ import annotations

from typing import Any

from jaxllm.config import ConfigError
from jaxllm.models import gte
from jaxllm.models.config.encoder import dense_head
from jaxllm.models.config.read import Config, flag, number, positive
from jaxllm.models.config.spec import ModelSpec
from jaxllm.pooling import DenseMap

DEFAULTS: Config = {**gte.DEFAULTS, "rope_theta": 10_000.0}
ENCODES = True
REMOTE_CODE = ("modeling",)
build = gte.build
NAMES, IGNORED = gte.published_names("new"), gte.needless("new")


def read(hf: Config) -> dict[str, Any]:
    """The configuration with NTK scaling as a longer base and linear scaling, which it is.

    By a factor f the base grows f-fold, and every turn by f^(2 / width of a head).
    """
    scaling = hf.get("rope_scaling")
    if scaling is None:
        return dict(hf)
    if not isinstance(scaling, dict) or scaling.get("type") != "ntk" or scaling.get("mixed_b"):
        raise ConfigError(
            f"config.json: rope_scaling {scaling!r:.80} is not supported; only ntk is"
        )
    factor = number(scaling, "factor")
    width = positive(hf, "hidden_size") // positive(hf, "num_attention_heads")
    turns = {"rope_type": "linear", "factor": factor ** (2 / max(1, width))}
    theta = number(hf, "rope_theta", DEFAULTS["rope_theta"]) * factor
    return {**hf, "rope_theta": theta, "rope_scaling": turns}


def spec(hf: Config) -> ModelSpec:
    """The spec of a complete configuration. Raises ConfigError."""
    if flag(hf, "logn_attention_scale"):
        raise ConfigError("config.json: logn_attention_scale is not supported; it must be false")
    return gte.spec(hf)


def classifier(hf: Config, labels: int) -> tuple[str, tuple[DenseMap, ...]]:
    """What is pooled for labels, and the maps behind it."""
    return "cls", dense_head(hf, labels, "new.pooler.dense", "classifier")
