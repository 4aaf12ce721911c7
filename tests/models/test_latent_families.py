"""Families with latent attention: their scale, what their layers remember, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import pytest

from jaxllm import models
from jaxllm.cache.layer import LatentKV
from jaxllm.config import ConfigError
from jaxllm.models.config.build import outline
from tests.goldens.cases import CASES

LITE, V3 = CASES["deepseek-v2-lite"], CASES["deepseek-v3-groups"]


def scale(hf: dict[str, Any]) -> float:
    attention = outline(models.make_spec(hf), 1, jnp.float32).layers[0].attention
    return attention.scale * math.sqrt(hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])


def test_scores_grow_by_the_square_of_what_mscale_all_dim_says() -> None:
    grown = 0.1 * 0.707 * math.log(8) + 1
    assert scale(LITE) == pytest.approx(grown**2)
    for without in ({**LITE["rope_scaling"], "mscale_all_dim": 0}, None):
        assert scale(LITE | {"rope_scaling": without}) == pytest.approx(1)


@pytest.mark.parametrize("hf", [LITE, V3, CASES["kimi-k2"]], ids=lambda hf: hf["model_type"])
def test_a_layer_remembers_one_latent_a_token_on_every_shard(hf: dict[str, Any]) -> None:
    spec = models.make_spec(hf)
    assert set(spec.layers) == {LatentKV(16, 4)}
    assert all(len(layer.plane_widths) == 1 for layer in spec.layers)
    assert [spec.heads(shards).kv_stored for shards in (1, 2, 4)] == [1, 2, 4]


@pytest.mark.parametrize(
    ("hf", "changes", "message"),
    [
        (LITE, {"topk_method": "best"}, "topk_method is 'best'; it must be 'greedy'"),
        (LITE, {"scoring_func": "sigmoid"}, "deepseek_v2 models have 'softmax'"),
        (LITE, {"moe_layer_freq": 2}, "moe_layer_freq is 2; deepseek_v2 models have 1"),
        (LITE, {"kv_lora_rank": None}, "kv_lora_rank is None; it must be a positive integer"),
        (LITE, {"q_lora_rank": 0}, "q_lora_rank is 0; it must be a positive integer"),
        (LITE, {"qk_rope_head_dim": 3}, "needs a positive even number"),
        (V3, {"scoring_func": "softmax"}, "deepseek_v3 models have 'sigmoid'"),
        (V3, {"topk_method": "greedy"}, "deepseek_v3 models have 'noaux_tc'"),
        (V3, {"n_group": 3}, "8 experts must divide into groups"),
        (V3, {"num_experts_per_tok": 5}, "topk_group leaves 4 experts to choose from"),
        (V3, {"rope_interleave": "no"}, "rope_interleave is 'no'; it must be true or false"),
    ],
)
def test_what_cannot_work_is_one_error(
    hf: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        outline(models.make_spec(hf | changes), 1, jnp.float32)


def test_experts_that_do_not_divide_are_refused_in_one_line() -> None:
    spec = models.make_spec(LITE | {"moe_intermediate_size": 7})
    with pytest.raises(ConfigError, match="experts of width 7 do not divide over 2 devices"):
        outline(spec, 2, jnp.float32)


@pytest.mark.parametrize("hf", [V3, CASES["glm4-moe-groups"], CASES["dots1-window"]])
def test_null_shared_experts_are_none(hf: dict[str, Any]) -> None:
    own, none, zero = (
        outline(models.make_spec(hf | {"n_shared_experts": count}), 1, jnp.float32).layers[1].mlp
        for count in (hf.get("n_shared_experts", 1), None, 0)
    )
    assert own.shared is not None and none.shared is zero.shared is None
