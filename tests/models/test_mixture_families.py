"""What single families of mixtures do: how Phi-3.5-MoE weighs its two experts, which layers are
dense, and what checkpoints call the parts."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import models
from jaxllm.config import ConfigError
from jaxllm.models.config.build import outline, rules
from jaxllm.models.config.mixture import dense_layers, sparse_layers
from jaxllm.models.phimoe import SparseMixer
from jaxllm.nn.mixture.routers import unchanged
from jaxllm.nn.rope import LongRope, NoRope
from pallas_kernels.route import choose
from tests.goldens.cases import CASES
from tests.targets import H200

MIXER = SparseMixer(2, score=unchanged, weigh=unchanged, near=0.5)


def test_an_expert_is_weighed_against_those_near_it_that_were_not_chosen_before() -> None:
    # 2.0 is near 3.0, 1.0 is not; of the rest 1.0 is near 2.0
    logits = jnp.array([[1.0, 3.0, -4.0, 2.0]])
    expert, weight = MIXER.choose(logits)
    near = 1 / (1 + np.exp(-1.0))
    np.testing.assert_array_equal(expert, [[1, 3]])
    np.testing.assert_allclose(weight, [[near, near]], rtol=1e-6)


def test_no_kernel_takes_the_rule_of_phi_for_another() -> None:
    assert choose(H200, jnp.zeros((4, 16)), MIXER) == "reference"


def test_phis_two_tables_have_factors_of_their_own() -> None:
    (rope,) = set(models.make_spec(CASES["phimoe-longrope"]).ropes)
    assert isinstance(rope, LongRope)
    assert (rope.short.scale, rope.long.scale) == (1.2, 1.4)


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"first_k_dense_replace": 2}, {0, 1}),
        ({"first_k_dense_replace": 9}, {0, 1, 2}),
        ({"first_k_dense_replace": 2, "mlp_layer_types": ["sparse", "dense", "sparse"]}, {1}),
    ],
)
def test_layers_are_dense_by_their_types_or_the_first(
    changes: dict[str, Any], dense: set[int]
) -> None:
    assert dense_layers({"num_hidden_layers": 3} | changes) == dense


@pytest.mark.parametrize(
    ("case", "own", "other"),
    [
        ("qwen3-moe-normalised", "num_experts", "num_local_experts"),
        ("olmoe-clip", "num_experts", "num_local_experts"),
        ("flex-olmo-biases", "num_experts", "num_local_experts"),
        ("mixtral-experts", "num_local_experts", "num_experts"),
        ("gpt-oss-fused", "num_local_experts", "num_experts"),
        ("minimax-m2-rotary-dim", "num_local_experts", "num_experts"),
    ],
)
def test_experts_are_counted_under_either_name_but_not_under_two(
    case: str, own: str, other: str
) -> None:
    config = {key: value for key, value in CASES[case].items() if key not in (own, other)}
    for names in ([own], [other], [own, other]):
        mixture = models.make_spec(config | dict.fromkeys(names, 7)).mixture
        assert mixture is not None and mixture.experts == 7
    with pytest.raises(ConfigError, match=f"{own} is 7, but {other} is 9; both are the number of"):
        models.make_spec(config | {own: 7, other: 9})


def test_a_dense_layer_that_is_not_there_is_passed_over() -> None:
    config = CASES["qwen3-moe-normalised"] | {"decoder_sparse_step": 1}
    layers = range(config["num_hidden_layers"])
    assert sparse_layers(config | {"mlp_only_layers": [0, -1, 99]}) == set(layers) - {0}


def test_a_dense_layer_of_command_a_may_turn_where_it_sees_everything() -> None:
    spec = models.make_spec(CASES["cohere2-moe-average"])
    assert spec.windows == (None, 16, None)
    assert [isinstance(rope, NoRope) for rope in spec.ropes] == [False, False, True]


def test_the_correction_of_exaone_has_its_published_name_and_a_newer_one() -> None:
    spec = models.make_spec(CASES["exaone-moe-types"])
    table = rules(spec, outline(spec, 1, jnp.float32))
    rule = next(rule for rule in table if rule.parameter == "layers.0.mlp.router.correction")
    assert [piece.name for (piece,) in rule.forms] == [
        f"model.layers.0.mlp.{own}e_score_correction_bias" for own in ("", "gate.")
    ]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("phimoe-longrope", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3; Phi"),
        ("phimoe-longrope", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "not 'linear'"),
        ("exaone-moe-types", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be 3 times"),
        ("cohere2-moe-average", {"expert_selection_fn": "top"}, "must be 'softmax' or 'sigmoid'"),
        (
            "cohere2-moe-average",
            {"shared_expert_combination_strategy": 1},
            "must be 'average' or 'sum'",
        ),
        ("minimax-m2-rotary-dim", {"scoring_func": "softmax"}, "minimax_m2 models have 'sigmoid'"),
        ("ernie4-5-moe", {"moe_norm_min": 0.5}, r"moe_norm_min is 0\.5; at most 1e-06"),
        ("internlm3-dynamic", {"bias": False}, "qkv_bias and bias differ"),
        ("gemma-gelu", {"use_bidirectional_attention": True}, "Gemma runs with causal attention"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        outline(models.make_spec(CASES[name] | changes), 1, jnp.float32)
