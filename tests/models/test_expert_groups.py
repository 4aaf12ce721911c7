"""Which experts and which share of them a device has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.models import ModelSpec, read_spec
from jaxllm.models.config.expert_groups import expert_groups
from jaxllm.models.config.spec import Mixture
from jaxllm.quantisation import WeightFormat
from tests.goldens.golden import load_golden


def spec(experts: int = 128, inner: int = 768) -> ModelSpec:
    """Qwen3-30B-A3B's mixture in a small model."""
    own = read_spec(load_golden("qwen3-moe-normalised").directory)
    return replace(own, mixture=Mixture(experts, 8, inner))


def groups(model: ModelSpec, devices: int, **wishes: Any) -> int:
    return expert_groups(EngineConfig(tensor_parallel_size=devices, **wishes), model)


def test_without_a_wish_all_devices_share_each_expert_as_far_as_kernels_take_the_share() -> None:
    assert [groups(spec(), devices) for devices in (1, 2, 4, 8)] == [1, 1, 1, 2]
    assert groups(spec(inner=2880), 2) == 2  # 45 units of 64 columns
    assert groups(spec(experts=3, inner=8), 8) == 2  # as many groups as experts allow
    few_bits = replace(spec(), formats={"model.layers.0.x": WeightFormat("fp4", 32)})
    assert groups(few_bits, 4) == 4
    assert groups(replace(spec(), mixture=None), 4) == 1


def test_a_wish_is_kept_or_refused_in_one_line() -> None:
    assert groups(spec(), 4, enable_expert_parallel=True) == 4
    assert groups(spec(), 4, expert_parallel_size=2) == 2
    assert groups(spec(experts=60), 8, enable_expert_parallel=True) == 8
    for wishes, model, message in (
        ({"expert_parallel_size": 3}, spec(), "3 does not divide --tensor-parallel-size 4"),
        ({"enable_expert_parallel": True}, spec(experts=3), "3 experts do not divide into 4"),
        ({"enable_expert_parallel": True}, replace(spec(), mixture=None), "has none"),
        ({"enable_expert_parallel": True, "expert_parallel_size": 2}, spec(), "leave one of them"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            groups(model, 4, **wishes)
        assert "\n" not in str(caught.value)
