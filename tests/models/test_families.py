"""Families beside transformers: what a config may leave out, windows, and RoPE's frequencies."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from jaxllm import models
from jaxllm.config import ConfigError
from jaxllm.models.config.build import outline
from jaxllm.models.config.rope import rope
from jaxllm.models.config.transformer import layer_window
from jaxllm.nn.rope import LongRope, StaticRope
from tests.goldens.cases import CASES
from tests.goldens.pooled_cases import CASES as POOLED

DIM, LENGTH = 16, 1024
WAVE = 2 * math.pi * 10000.0 ** (np.arange(0, DIM, 2) / DIM)  # tokens of a turn


# Of remote code alone; transformers does not know them
FOREIGN = {"chatglm", "internlm2", "kimi_k2", "new"}


@pytest.mark.parametrize("family", sorted({*models.families()} - FOREIGN))
def test_what_a_config_may_leave_out_is_what_transformers_takes(family: str) -> None:
    # A file's name has no hyphen
    name = family if family in CONFIG_MAPPING else family.replace("_", "-")
    theirs, own = AutoConfig.for_model(name).get_text_config(), models.family(family)
    spelling = {common: key for key, common in getattr(own, "SPELLING", {}).items()}
    for common, value in own.DEFAULTS.items():
        key = spelling.get(common, common)
        key = key if hasattr(theirs, key) else common  # a spelling of published files alone
        if key == "sliding_window" and not getattr(theirs, "use_sliding_window", True):
            assert not theirs.sliding_window  # it drops a window that is switched off
        elif common in ("rope_theta", "partial_rotary_factor"):
            assert theirs.rope_parameters[common] == value
        elif key == "max_window_layers" or hasattr(theirs, key):
            assert getattr(theirs, key) == value, key
        else:
            raise AssertionError(f"transformers has no {key}")


@pytest.mark.parametrize("shards", [2, 4])
def test_every_family_has_a_golden_that_divides_over_devices(shards: int) -> None:
    # Those that do not are skipped where engines over devices run them
    of_encoders = [files["config.json"] for files in POOLED.values()]
    divided = {"new"}  # GTE under other names
    for config in (*CASES.values(), *of_encoders):
        with suppress(ConfigError):
            outline(models.make_spec(config), shards, np.float32)
            divided.add(config["model_type"].replace("-", "_"))
    assert divided == {*models.families()}


def frequencies(settings: dict[str, Any]) -> np.ndarray:
    """Tokens of a turn of each pair of dimensions."""
    found = rope({"max_position_embeddings": LENGTH, "rope_scaling": settings}, DIM)
    assert isinstance(found, StaticRope)
    return 2 * math.pi / np.array(found.inv_freq)


def test_linear_scaling_stretches_every_turn() -> None:
    found = frequencies({"type": "linear", "factor": 2.5})
    np.testing.assert_allclose(found, 2.5 * WAVE, rtol=1e-5)


def test_llama3_keeps_short_turns_and_stretches_long_ones() -> None:
    found = frequencies(
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    )
    short, long = WAVE < LENGTH / 4, WAVE > LENGTH
    assert short.any() and long.any() and not (short | long).all()
    np.testing.assert_allclose(found[short], WAVE[short], rtol=1e-5)
    np.testing.assert_allclose(found[long], 8 * WAVE[long], rtol=1e-5)
    between = ~(short | long)
    assert ((found[between] > WAVE[between]) & (found[between] < 8 * WAVE[between])).all()


def test_yarn_stretches_slow_dimensions_and_scales_the_logits() -> None:
    settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    found = frequencies(settings)
    ratio = found / WAVE
    assert (np.diff(ratio) >= -1e-6).all()
    np.testing.assert_allclose(ratio[[0, -1]], [1, 4], rtol=1e-5)
    turned = rope({"max_position_embeddings": LENGTH, "rope_scaling": settings}, DIM)
    assert isinstance(turned, StaticRope)
    assert turned.scale == pytest.approx(0.1 * math.log(4) + 1)


def test_a_long_rope_divides_each_frequency_by_a_factor_of_its_own() -> None:
    settings = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [*range(1, 9)]}
    given = {"original_max_position_embeddings": 256, "rope_scaling": settings}
    found = rope({"max_position_embeddings": LENGTH} | given, DIM)
    assert isinstance(found, LongRope) and (found.original, found.length) == (256, LENGTH)
    for table, factors in ((found.short, np.ones(8)), (found.long, np.arange(1, 9))):
        np.testing.assert_allclose(2 * math.pi / np.array(table.inv_freq), WAVE * factors, 1e-5)
        assert table.scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(256)))


def test_layer_types_may_turn_by_settings_of_their_own() -> None:
    spec = models.make_spec(CASES["gemma3_text-older-keys"])
    local, _, other = spec.ropes
    assert isinstance(local, StaticRope) and isinstance(other, StaticRope)
    assert local.inv_freq[0] == 1 and other.inv_freq[0] == 0.25
    assert local.inv_freq[1] == pytest.approx(500 ** (-2 / 8))
    assert other.inv_freq[1] == pytest.approx(100000 ** (-2 / 8) / 4)
    assert spec.windows == (16, 16, None)


HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 7,
    "max_window_layers": 2,
}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, [None, None, 7, 7]),
        ({"max_window_layers": 0}, [7] * 4),
        ({"max_window_layers": 9}, [None] * 4),
        ({"use_sliding_window": False}, [None] * 4),
        ({"use_sliding_window": None}, [None] * 4),
        ({"sliding_window": None}, [None] * 4),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, [7, None, 7, None]),
        ({"layer_types": ["full_attention"] * 4, "use_sliding_window": False}, [None] * 4),
    ],
)
def test_the_windows_of_layers(changes: dict[str, Any], windows: list[int | None]) -> None:
    window = layer_window(HYBRID | changes)
    assert [window(layer) for layer in range(4)] == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_window_layers": True}, "max_window_layers is True; it must be an integer"),
        ({"use_sliding_window": "yes"}, "use_sliding_window is 'yes'; it must be true or false"),
        ({"sliding_window": -7}, "sliding_window is -7; it must be a positive integer"),
        ({"layer_types": "full_attention"}, "layer_types must be 4 times"),
        ({"layer_types": [["full_attention"]] * 4}, "layer_types must be 4 times"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types must be 4 times"),
    ],
)
def test_windows_that_contradict_each_other_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        layer_window(HYBRID | changes)


@pytest.mark.parametrize("name", CASES)
def test_the_context_is_never_shorter_than_the_native_one(name: str) -> None:
    spec = models.make_spec(CASES[name])
    assert spec.context_length >= spec.config["max_position_embeddings"]
    assert spec.shared_length is None or spec.shared_length < spec.context_length
