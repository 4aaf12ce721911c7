"""RoPE settings of a configuration, in their older and newer forms."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.models import read_spec
from jaxllm.models.config.rope import rope
from jaxllm.nn.rope import DynamicRope, StaticRope
from tests.goldens.golden import HERE

BASE = {"max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def test_older_and_newer_forms_say_the_same() -> None:
    old = rope(BASE | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8)
    new = rope(
        BASE | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}, 8
    )
    assert old == new
    assert isinstance(new, StaticRope)
    assert new.inv_freq[0] == 0.5


def test_plain_rope_has_a_default_base() -> None:
    assert rope(BASE, 8) == rope(BASE | {"rope_scaling": None, "rope_theta": 10000.0}, 8)
    assert rope(BASE, 8) == rope(
        BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, 8
    )


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_frequencies_are_as_exact_as_those_of_torch(theta: float) -> None:
    found = rope(BASE | {"rope_theta": theta}, 128)
    assert isinstance(found, StaticRope)
    exact = theta ** -(np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(found.inv_freq, exact, rtol=9e-8, atol=0)


def test_the_original_length_defaults_to_the_models_and_may_stand_outside() -> None:
    inside = rope(BASE | {"rope_scaling": YARN}, 8)
    outside = rope(
        BASE
        | {
            "rope_scaling": YARN | {"original_max_position_embeddings": 32},
            "original_max_position_embeddings": 16,
        },
        8,
    )
    default = rope(
        {"max_position_embeddings": 16, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 8
    )
    assert inside == outside == default


def test_yarn_without_a_factor_takes_the_ratio_of_lengths() -> None:
    without = {key: value for key, value in YARN.items() if key != "factor"}
    assert rope(BASE | {"rope_scaling": without}, 8) == rope(BASE | {"rope_scaling": YARN}, 8)


def test_yarn_without_a_factor_and_a_first_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="YaRN scaling has no factor; give it, or original_max"):
        rope(BASE | {"rope_scaling": {"rope_type": "yarn", "factor": None}}, 8)


def test_dynamic_scaling_starts_at_the_models_length() -> None:
    assert rope(BASE | {"rope_scaling": {"type": "dynamic", "factor": 3}}, 8) == DynamicRope(
        10000.0, 8, 3.0, 64
    )


@pytest.mark.parametrize(
    ("length", "factors", "scale"), [(256, [1.0, 1.5], 1.2), (257, [2.0, 3.0], 1.4)]
)
def test_phi_3_5_moe_turns_by_long_factors_where_more_than_its_first_length_is_served(
    length: int, factors: list[float], scale: float
) -> None:
    # As published and in transformers 4; transformers 5 has the long scale with short factors
    found = read_spec(HERE / "phimoe-longrope").serving(length).ropes[0]
    position, frequency = np.arange(300), 1 / (np.array(factors) * 1e6 ** np.array([0, 0.5]))
    angle = position[:, None] * frequency
    cos, sin, *_ = found(jnp.asarray(position), None)
    np.testing.assert_allclose(cos, scale * np.cos(angle), atol=1e-4)
    np.testing.assert_allclose(sin, scale * np.sin(angle), atol=1e-4)


@pytest.mark.parametrize("theta", [0, 0.0, -1, "10000", True, 1e300])
def test_a_base_that_is_no_positive_number_is_refused(theta: object) -> None:
    for config in ({"rope_theta": theta}, {"rope_parameters": {"rope_theta": theta}}):
        with pytest.raises(ConfigError, match=r"rope_theta is .*; it must be a positive number"):
            rope(BASE | config, 8)


def test_a_null_base_is_the_default_and_an_empty_object_is_absent() -> None:
    assert rope(BASE | {"rope_theta": None, "rope_scaling": {}}, 8) == rope(BASE, 8)
    newer = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    assert rope(BASE | {"rope_scaling": {}} | newer, 8) == rope(BASE | newer, 8) != rope(BASE, 8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"rope_type": "shortrope", "factor": 2.0},
            "RoPE type 'shortrope' is not supported \\(supported: default, linear",
        ),
        ({"type": "linear"}, "factor is None; it must be a positive number"),
        ({"type": "linear", "factor": "2"}, "factor is '2'"),
        ({"type": "linear", "factor": -2.0}, "factor is -2.0"),
        ({"type": "linear", "factor": 0}, "factor is 0; it must be a positive number"),
        ({"type": "linear", "factor": True}, "factor is True"),
        ({"type": "linear", "factor": float("inf")}, "factor is inf"),
        ({"rope_type": "", "factor": 2.0}, "RoPE type '' is not supported"),
        ({"rope_type": ["linear"]}, "RoPE type \\['linear'\\] is not supported"),
        (YARN | {"beta_fast": 0}, "beta_fast is 0"),
        (YARN | {"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
        (YARN | {"rope_theta": 1}, "rope_theta is 1.0; YaRN scaling needs more than 1"),
        (0, "one flat object"),
        (False, "one flat object"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "must be larger than low_freq_factor",
        ),
        (
            {"full_attention": {"rope_type": "default"}},
            "one flat object is expected, for all layers",
        ),
        (LONG | {"long_factor": [1.0]}, "long_factor is .*; it must be a list of 4 numbers"),
        (LONG | {"short_factor": [1, 1, 0, 1]}, "short_factor is 0; it must be a positive number"),
        ([1], "are not supported"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope(BASE | {"rope_scaling": settings}, 8)
