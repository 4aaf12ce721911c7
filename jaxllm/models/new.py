"""GTE as its makers publish it ("new"): fused projections, and a rotary base of its own scaling.

Checkpoints name remote code, which is never run: this file stands for it.
"""

from __future__ import annotations

from typing import Any

from jaxllm.config import ConfigError
from jaxllm.models import gte
from jaxllm.models.config.encoder import dense_head
from jaxllm.models.config.read import Config
from jaxllm.pooling import DenseMap

DEFAULTS: Config = {**gte.DEFAULTS, "rope_theta": 10_000.0}
ENCODES = True
REMOTE_CODE = ("modeling",)
spec = gte.spec
build = gte.build
NAMES = gte.published_names("new")
IGNORED = gte.needless("new")


def read(hf: Config) -> dict[str, Any]:
    """The configuration with its rotary base. Raises ConfigError."""
    scaling = hf.get("rope_scaling")
    if scaling is not None and (not isinstance(scaling, dict) or scaling.get("type") != "ntk"):
        raise ConfigError(
            f"config.json: rope_scaling {scaling!r:.80} is not supported; only ntk is"
        )
    return dict(gte.stretched(hf, DEFAULTS["rope_theta"]))


def classifier(hf: Config, labels: int) -> tuple[str, tuple[DenseMap, ...]]:
    """What is pooled for labels, and the maps behind it."""
    return "cls", dense_head(hf, labels, "new.pooler.dense", "classifier")
