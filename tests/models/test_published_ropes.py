"""RoPE frequencies of published models, beside the formulas of the papers in float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

from jaxllm import models
from jaxllm.models.config.rope import rope
from jaxllm.models.config.spec import ModelSpec
from jaxllm.nn.rope import (
    DynamicRope,
    LongRope,
    NoRope,
    PartialRope,
    QueryScaledRope,
    Rope,
    StaticRope,
)
from tests.models.published import FULL, LLAMA3, PUBLISHED, SLIDING

OLD = {"rope_theta": 500.0, "max_position_embeddings": 4096}


@functools.cache
def spec_of(name: str) -> ModelSpec:
    return models.make_spec(PUBLISHED[name])


def changed(name: str, **values: Any) -> ModelSpec:
    """The spec of a published model with other values; None takes a key away."""
    merged = PUBLISHED[name] | values
    return models.make_spec({key: value for key, value in merged.items() if value is not None})


def static(found: Rope) -> StaticRope:
    """The table inside a rope of which all or some dimensions turn."""
    inner = found.turning if isinstance(found, PartialRope) else found
    assert isinstance(inner, StaticRope)
    return inner


def plain(theta: float, dim: int) -> np.ndarray:
    return np.array([theta ** (-2 * pair / dim) for pair in range(dim // 2)])


def llama3(theta: float, dim: int, factor: float, original: int) -> np.ndarray:
    """Waves longer than the original length are stretched, those below a fourth of it kept."""
    made = []
    for turn in plain(theta, dim):
        wave = 2 * math.pi / turn
        if wave < original / 4:
            made.append(turn)
        elif wave > original:
            made.append(turn / factor)
        else:
            kept = (original / wave - 1) / 3
            made.append((1 - kept) * turn / factor + kept * turn)
    return np.array(made)


def yarn(
    theta: float, dim: int, factor: float, original: int, *, fast: float = 32, truncate: bool = True
) -> np.ndarray:
    """Pairs that turn over `fast` times in the original length are kept, below once stretched."""

    def pair(turns: float) -> float:
        return dim / 2 * math.log(original / (2 * math.pi * turns)) / math.log(theta)

    low, high = pair(fast), pair(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    made = []
    for number, turn in enumerate(plain(theta, dim)):
        stretched = min(max((number - low) / (high - low), 0.0), 1.0)
        made.append(turn / factor * stretched + turn * (1 - stretched))
    return np.array(made)


@pytest.mark.parametrize(
    ("name", "theta", "dim"),
    [
        ("Llama-2-7B", 1e4, 128),
        ("Qwen2.5-0.5B", 1e6, 64),
        ("Qwen2.5-7B", 1e6, 128),
        ("Qwen3-0.6B", 1e6, 128),
        ("Qwen3-8B", 1e6, 128),
        ("Qwen3-30B-A3B", 1e6, 128),
        ("Gemma-2-9B", 1e4, 256),
        ("Gemma-2-27B", 1e4, 128),
        ("StarCoder2-3B", 999999.4420358813, 128),
        ("Granite-3.1-8B", 5e6, 128),
        ("Command-R", 8e6, 128),
        ("OLMo-2-7B", 5e5, 128),
        ("ERNIE-4.5-21B-A3B", 5e5, 128),
        ("Seed-OSS-36B", 1e7, 128),
        ("Mistral-Small-3.1", 1e9, 128),
    ],
)
def test_plain_frequencies_are_powers_of_the_base(name: str, theta: float, dim: int) -> None:
    for found in set(spec_of(name).ropes):
        assert isinstance(found, StaticRope)
        assert found.scale == 1.0
        np.testing.assert_allclose(found.inv_freq, plain(theta, dim), rtol=2e-6)


@pytest.mark.parametrize(
    ("name", "theta", "turning", "passing"),
    [
        ("Pythia-1.4B", 1e4, 32, 48),
        ("GPT-J-6B", 1e4, 64, 96),
        ("GPT-NeoX-20B", 1e4, 24, 36),
        ("StableLM-2-1.6B", 1e4, 16, 24),
        ("Minitron-4B", 1e4, 64, 32),
        ("GLM-4-9B-0414", 1e4, 64, 32),
        ("GLM-4.5-Air", 1e6, 64, 32),
        ("MiniMax-M2", 5e6, 64, 32),
        ("ChatGLM3-6B", 1e4, 64, 32),
        ("GLM-4-9B-chat", 5e6, 64, 32),
    ],
)
def test_only_the_first_dimensions_of_a_head_turn(
    name: str, theta: float, turning: int, passing: int
) -> None:
    for found in set(spec_of(name).ropes):
        assert isinstance(found, PartialRope)
        assert found.passing == passing
        np.testing.assert_allclose(static(found).inv_freq, plain(theta, turning), rtol=2e-6)


@pytest.mark.parametrize(
    ("name", "factor"), [("Llama-3.1-8B-Instruct", 8.0), ("EXAONE-4.0-32B", 16.0)]
)
def test_llama3_scaling_stretches_long_waves_alone(name: str, factor: float) -> None:
    spec = spec_of(name)
    theta = PUBLISHED[name]["rope_theta"]
    found = np.array(static(spec.ropes[0]).inv_freq)
    np.testing.assert_allclose(found, llama3(theta, 128, factor, 8192), rtol=5e-6)
    unscaled = plain(theta, 128)
    np.testing.assert_allclose(found[0], unscaled[0], rtol=2e-6)
    np.testing.assert_allclose(found[-1], unscaled[-1] / factor, rtol=2e-6)
    assert spec.context_length == 131072


def test_llama3_scaling_lies_between_both_ends_in_the_middle() -> None:
    found = np.array(static(spec_of("Llama-3.1-8B-Instruct").ropes[0]).inv_freq)
    share = plain(5e5, 128) / found
    assert share.min() == pytest.approx(1, rel=1e-5) and share.max() == pytest.approx(8, rel=1e-5)
    assert (np.diff(share) > -1e-4).all()
    between = (share > 1.001) & (share < 7.999)
    assert 0 < between.sum() < len(share) / 2


@pytest.mark.parametrize(
    ("name", "theta", "factor", "fast"),
    [
        ("DeepSeek-V2-Lite", 1e4, 40.0, 32),
        ("DeepSeek-V3", 1e4, 40.0, 32),
        ("Kimi-K2", 5e4, 32.0, 1),
    ],
)
def test_yarn_keeps_fast_pairs_and_stretches_slow_ones(
    name: str, theta: float, factor: float, fast: float
) -> None:
    found = static(spec_of(name).ropes[0])
    wanted = yarn(theta, 64, factor, 4096, fast=fast)
    np.testing.assert_allclose(found.inv_freq, wanted, rtol=5e-6)
    # Equal mscale and mscale_all_dim: cos and sin keep their size, scores grow instead
    assert found.scale == 1.0


def test_gpt_oss_does_not_round_the_pairs_where_yarn_begins_and_ends() -> None:
    found = np.array(static(spec_of("gpt-oss-20b").ropes[0]).inv_freq)
    np.testing.assert_allclose(found, yarn(150000.0, 64, 32.0, 4096, truncate=False), rtol=5e-6)
    rounded = yarn(150000.0, 64, 32.0, 4096)
    assert np.abs(found / rounded - 1).max() > 0.01


@pytest.mark.parametrize(
    ("more", "scale"),
    [
        ({}, 0.1 * math.log(8.0) + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, None),
        ({"mscale": 0, "mscale_all_dim": 0}, 0.1 * math.log(8.0) + 1),
        ({"mscale": 0.707}, 0.1 * math.log(8.0) + 1),
    ],
    ids=["usual", "given", "two weights", "zeros", "one weight"],
)
def test_yarn_scales_cos_and_sin_as_its_settings_say(
    more: dict[str, Any], scale: float | None
) -> None:
    if scale is None:
        scale = (0.0707 * math.log(8.0) + 1) / (0.1 * math.log(8.0) + 1)
    settings = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
    found = static(rope(OLD | {"rope_scaling": settings | more}, 64))
    assert found.scale == pytest.approx(scale)
    np.testing.assert_allclose(found.inv_freq, yarn(500.0, 64, 8.0, 512), rtol=5e-6)


def test_olmo_3_stretches_full_layers_alone() -> None:
    ropes = [static(found) for found in spec_of("OLMo-3-7B").ropes]
    for layer, found in enumerate(ropes):
        full = (layer + 1) % 4 == 0
        wanted = yarn(5e5, 128, 8.0, 8192) if full else plain(5e5, 128)
        np.testing.assert_allclose(found.inv_freq, wanted, rtol=5e-6)
        assert found.scale == (1.2079441541679836 if full else 1.0)


def test_gemma_3_turns_full_layers_by_a_longer_base_slowed_eightfold() -> None:
    ropes = spec_of("Gemma-3-27B").ropes
    assert len(ropes) == 62
    for layer, found in enumerate(ropes):
        wanted = plain(1e4, 128) if (layer + 1) % 6 else plain(1e6, 128) / 8
        np.testing.assert_allclose(static(found).inv_freq, wanted, rtol=2e-6)


def test_the_smallest_gemma_3_has_two_bases_and_no_scaling() -> None:
    ropes = spec_of("Gemma-3-1B").ropes
    for layer, found in enumerate(ropes):
        wanted = plain(1e4 if (layer + 1) % 6 else 1e6, 256)
        np.testing.assert_allclose(static(found).inv_freq, wanted, rtol=2e-6)


@pytest.mark.parametrize("name", ["Hunyuan-7B", "Hunyuan-A13B"])
def test_hunyuans_alpha_is_a_longer_base_of_a_plain_rope(name: str) -> None:
    spec = spec_of(name)
    base = 1e4 * 1000.0 ** (128 / 126)
    np.testing.assert_allclose(static(spec.ropes[0]).inv_freq, plain(base, 128), rtol=5e-6)
    assert len(set(spec.ropes)) == 1
    assert spec.shared_length is None


def test_dynamic_scaling_without_alpha_grows_with_the_sequence() -> None:
    spec = spec_of("InternLM2.5-7B")
    assert set(spec.ropes) == {DynamicRope(theta=1e6, dim=128, factor=2.0, original=32768)}
    assert (spec.shared_length, spec.context_length) == (32768, 65536)


@pytest.mark.parametrize("family", ["new", "gte"])  # what its makers, and Snowflake, call it
def test_gtes_ntk_is_a_longer_base_and_a_little_slower(family: str) -> None:
    found = static(changed("gte-multilingual-base", model_type=family).ropes[0])
    wanted = plain(20000 * 8.0, 64) / 8.0 ** (2 / 64)
    np.testing.assert_allclose(found.inv_freq, wanted, rtol=5e-6)


@pytest.mark.parametrize(("name", "passing"), [("Phi-3-mini-128k", 0), ("Phi-4-mini", 16)])
def test_longrope_has_one_table_for_the_first_length_and_one_beyond(
    name: str, passing: int
) -> None:
    found = spec_of(name).ropes[0]
    if passing:
        assert isinstance(found, PartialRope) and found.passing == passing
        found = found.turning
    assert isinstance(found, LongRope)
    np.testing.assert_allclose(found.short.inv_freq, plain(1e4, 96), rtol=2e-6)
    np.testing.assert_allclose(found.long.inv_freq, plain(1e4, 96) / 2, rtol=2e-6)
    scale = math.sqrt(1 + math.log(131072 / 4096) / math.log(4096))
    assert (found.short.scale, found.long.scale) == pytest.approx((scale, scale))
    assert (found.original, found.length) == (4096, 131072)


@pytest.mark.parametrize("length", [1024, 4096, 4097])
def test_longrope_knows_the_length_that_is_served(length: int) -> None:
    partial = models.make_spec(PUBLISHED["Phi-4-mini"], length=length).ropes[0]
    assert isinstance(partial, PartialRope) and isinstance(partial.turning, LongRope)
    assert partial.turning.length == length


def test_older_names_of_longrope_mean_the_same() -> None:
    settings = PUBLISHED["Phi-3-mini-128k"]["rope_scaling"]
    for old in ("su", "yarn"):
        renamed = changed("Phi-3-mini-128k", rope_scaling=settings | {"type": old})
        assert renamed.ropes == spec_of("Phi-3-mini-128k").ropes


@pytest.mark.parametrize(
    ("name", "dim", "every"), [("SmolLM3-3B", 128, 4), ("Command-R7B", 128, 4)]
)
def test_every_fourth_layer_of_some_models_does_not_turn(name: str, dim: int, every: int) -> None:
    for layer, found in enumerate(spec_of(name).ropes):
        if (layer + 1) % every:
            assert len(static(found).inv_freq) == dim // 2
        else:
            assert found == NoRope(dim // 2)


def test_full_layers_of_exaone_4_do_not_turn_beside_layers_with_windows() -> None:
    spec = spec_of("EXAONE-4.0-32B")
    still = [isinstance(found, NoRope) for found in spec.ropes]
    assert still == [window is None for window in spec.windows]
    assert sum(still) == 16


def test_ministral_3_scales_queries_beyond_the_first_length() -> None:
    own = PUBLISHED["Mistral-Small-3.1"]["text_config"]
    hf = own | {"model_type": "ministral3", "max_position_embeddings": 262144}
    found = models.make_spec({key: v for key, v in hf.items() if key != "rope_theta"}).ropes[0]
    assert isinstance(found, QueryScaledRope)
    assert (found.beta, found.original) == (0.1, 16384)
    wanted = yarn(1e6, 128, 16.0, 16384)
    np.testing.assert_allclose(static(found.turning).inv_freq, wanted, rtol=5e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"type": "linear", "factor": 4.0},
        {"type": "dynamic", "factor": 4.0},
        LLAMA3,
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [3.0] * 32},
    ],
    ids=["linear", "dynamic", "llama3", "yarn", "longrope"],
)
def test_each_type_is_the_same_in_the_older_and_the_newer_form(settings: dict[str, Any]) -> None:
    older = rope(OLD | {"rope_scaling": settings}, 64)
    name = settings.get("rope_type", settings.get("type"))
    newer = {**settings, "rope_type": name, "rope_theta": 500.0}
    newer.pop("type", None)
    length = {"max_position_embeddings": 4096}
    assert rope(length | {"rope_parameters": newer}, 64) == older
    nested = {FULL: newer, SLIDING: {"rope_type": "default", "rope_theta": 500.0}}
    assert rope(length | {"rope_parameters": nested}, 64, FULL) == older
    assert rope(length | {"rope_parameters": nested}, 64, SLIDING) == rope(OLD, 64) != older


def test_gemma_3_reads_its_older_keys_and_the_nested_ones_alike() -> None:
    nested = {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
    inner = PUBLISHED["Gemma-3-27B"]["text_config"] | {"rope_parameters": nested}
    del inner["rope_scaling"]
    newer = changed("Gemma-3-27B", text_config=inner)
    assert newer.ropes == spec_of("Gemma-3-27B").ropes


def test_olmo_3_reads_its_older_keys_and_the_nested_ones_alike() -> None:
    scaled = PUBLISHED["OLMo-3-7B"]["rope_scaling"] | {"rope_theta": 5e5}
    nested = {FULL: scaled, SLIDING: {"rope_type": "default", "rope_theta": 5e5}}
    newer = changed("OLMo-3-7B", rope_theta=None, rope_scaling=None, rope_parameters=nested)
    assert newer.ropes == spec_of("OLMo-3-7B").ropes


def test_modernbert_reads_its_older_keys_and_the_nested_ones_alike() -> None:
    nested = {FULL: {"rope_theta": 160000.0}, SLIDING: {"rope_theta": 10000.0}}
    newer = changed(
        "ModernBERT-base", global_rope_theta=None, local_rope_theta=None, rope_parameters=nested
    )
    assert newer.ropes == spec_of("ModernBERT-base").ropes


def test_hunyuans_alpha_is_read_in_the_newer_form() -> None:
    own = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}
    newer = changed("Hunyuan-7B", rope_scaling=None, rope_parameters=own)
    assert newer.ropes == spec_of("Hunyuan-7B").ropes
