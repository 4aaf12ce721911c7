"""RoPE settings of Gemma 3 that leave layer types out, beside transformers' configuration."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import Gemma3TextConfig

from jaxllm import models
from jaxllm.config import ConfigError
from jaxllm.models.config.spec import ModelSpec
from tests.models.published import FULL, PUBLISHED, SLIDING


def gemma(settings: dict[str, Any]) -> ModelSpec:
    """The spec of Gemma 3 27B with these RoPE settings and no others."""
    published = PUBLISHED["Gemma-3-27B"]
    inner = {k: v for k, v in published["text_config"].items() if not k.startswith("rope")}
    return models.make_spec(published | {"text_config": inner | settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}}},
        {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0}, SLIDING: None}},
        {"rope_parameters": {SLIDING: {"rope_type": "linear", "factor": 2.0}}},
        {"rope_parameters": {FULL: {}}, "rope_theta": 7e5, "rope_local_base_freq": 2e3},
        {
            "rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}},
            "rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 9e5},
        },
        {"rope_parameters": {}},
    ],
    ids=["full", "null", "sliding", "older-bases", "older-scaling", "none"],
)
def test_gemma_3_reads_incomplete_nested_settings_as_transformers_does(
    settings: dict[str, Any],
) -> None:
    complete = Gemma3TextConfig(**copy.deepcopy(settings)).rope_parameters
    assert gemma(settings).ropes == gemma({"rope_parameters": complete}).ropes


def test_gemma_3_refuses_settings_that_no_layer_type_has() -> None:
    flat = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    with pytest.raises(ConfigError, match="must have an object for full_attention or sliding"):
        gemma({"rope_parameters": flat})
