"""`ModelSpec`: what the engine knows of a model, and that it agrees with what is built."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import pytest

from jaxllm import models
from jaxllm.cache.layer import LatentKV, LayerCache, PagedKV
from jaxllm.config import ConfigError
from jaxllm.models.config.build import held_layers, ignored, outline, rules
from jaxllm.nn.attention import Attention
from jaxllm.nn.latent import LatentAttention
from jaxllm.nn.mlp import GatedMLP
from jaxllm.nn.rope import DynamicRope
from tests.goldens.cases import CASES

BASE = CASES["llama-gqa"]


def kept_by(attention: Attention | LatentAttention) -> tuple[LayerCache, int]:
    """What an attention's layer remembers, and its query heads."""
    if isinstance(attention, LatentAttention):
        return LatentKV(attention.sizes.rank, attention.sizes.rope), attention.sizes.heads
    heads = attention.heads
    cache = PagedKV(
        heads.kv,
        heads.dim,
        heads.dim,
        attention.window,
        order=heads.order,
        width=heads.width,
    )
    return cache, heads.query


@pytest.mark.parametrize("name", CASES)
def test_a_spec_describes_the_model_that_is_built(name: str) -> None:
    spec = models.make_spec(CASES[name])
    model = outline(spec, 1, jnp.float32)
    assert len(model.layers) == len(spec.layers)
    for block, layer in zip(model.layers, spec.layers, strict=True):
        cache, heads = kept_by(block.attention)
        if layer.rounding_refusal is not None:
            cache = cache.unrounded(layer.rounding_refusal)
        assert (cache, heads) == (layer, spec.query_heads)
        if all(isinstance(each.mlp, GatedMLP) for each in model.layers):
            assert block.mlp.down.weight.shape == (spec.width, spec.inner_width)
        assert block.attention_norm.eps == spec.norm_eps
    narrower = spec.config.get("word_embed_proj_dim", spec.width)
    assert model.embed.weight.shape == (spec.vocab_size, narrower)
    assert (model.head is None) == spec.tied
    assert model.ropes == spec.ropes
    assert len(spec.ropes) == len(spec.layers)


@pytest.mark.parametrize("name", CASES)
def test_a_spec_comes_back_from_json(name: str) -> None:
    spec = models.make_spec(CASES[name]).first_layers(1).with_heads_of(64)
    sent = json.loads(json.dumps(spec.to_dict()))
    assert models.make_spec(**sent) == spec


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        models.make_spec(BASE).width = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("llama-gqa", (None, None)),
        ("mistral-window", (16, 16)),
        ("mistral-full-mqa", (None, None)),
        ("qwen2-tied", (None, None)),
        ("qwen2-window-mha", (None, 16)),
        ("qwen2-layer-types-linear", (8, None)),
        ("qwen3-bias-window", (None, 20)),
    ],
)
def test_every_layer_has_its_window(name: str, windows: tuple[int | None, ...]) -> None:
    assert models.make_spec(CASES[name]).windows == windows


@pytest.mark.parametrize("name", ["qwen2-layer-types-linear", "qwen3-bias-window", "llama-gqa"])
def test_the_first_layers_are_those_of_the_whole_model(name: str) -> None:
    spec = models.make_spec(CASES[name])
    few = spec.first_layers(1)
    assert few == dataclasses.replace(spec, layers=spec.layers[:1], ropes=spec.ropes[:1])
    whole = {rule.parameter: rule for rule in rules(spec, outline(spec, 2, jnp.float32))}
    for rule in rules(few, outline(few, 2, jnp.float32)):
        assert whole.pop(rule.parameter) == rule
    assert whole and all(name.startswith("layers.1.") for name in whole)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": None}, None),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "float16", "dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": None}, "float32"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
    ],
)
def test_the_stored_dtype_has_two_keys_and_two_spellings(
    changes: dict[str, Any], dtype: str | None
) -> None:
    assert models.make_spec(BASE | changes).stored_dtype == dtype


@pytest.mark.parametrize("dtype", ["int3", "int8", "torch.int3", "", 16, ["float32"]])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_stored_dtype_that_no_checkpoint_can_hold_is_refused(key: str, dtype: object) -> None:
    sizes = {name: value for name, value in BASE.items() if "dtype" not in name}
    with pytest.raises(ConfigError, match=r"dtype .* is not supported \(supported: float64, .*bf"):
        models.make_spec(sizes | {key: dtype})


def test_only_dynamic_scaling_ties_keys_to_their_prompt() -> None:
    spec = models.make_spec(CASES["llama-dynamic"])
    assert all(isinstance(rope, DynamicRope) for rope in spec.ropes)
    assert (spec.shared_length, spec.context_length) == (64, 192)
    assert not spec.keys_vary(64) and spec.keys_vary(65)
    for name in ("llama-gqa", "llama-yarn", "qwen2-layer-types-linear", "llama-llama3"):
        assert not models.make_spec(CASES[name]).keys_vary(10**6)


def test_scales_belong_to_layers() -> None:
    spec, pair = models.make_spec(BASE), [["k", []], ["v", [2, 1]]]
    assert [layer.scales for layer in spec.layers] == [None, None]
    scaled = spec.with_scales([None, pair])
    assert scaled.layers[0] == spec.layers[0]
    assert scaled.layers[1] == dataclasses.replace(
        spec.layers[1], scales=(("k", ()), ("v", (2, 1)))
    )
    assert spec.with_scales([]) == scaled.with_scales([None, None]) == spec
    assert models.make_spec(**scaled.to_dict()) == scaled


def test_a_layer_with_scales_has_a_parameter_for_them() -> None:
    spec = models.make_spec(BASE).with_scales([None, (("k", (2,)), ("v", ()))])
    model = outline(spec, 4, jnp.float32)
    assert [block.attention.kv_scales is None for block in model.layers] == [True, False]
    (rule,) = (rule for rule in rules(spec, model) if rule.parameter.endswith("kv_scales"))
    assert rule.parameter == "layers.1.attention.kv_scales"
    assert [(p.name, p.source, p.view, p.start, p.repeat) for p in rule.pieces] == [
        ("k", (2,), (2, 1), 0, 2),
        ("v", (), (1, 1), 1, 4),
    ]


def test_heads_are_laid_out_for_any_number_of_shards_that_divides() -> None:
    spec = models.make_spec(BASE)
    assert [layer.living(None) for layer in spec.layers] == [PagedKV(2, 4, 4)] * 2
    assert [spec.heads(shards).kv_stored for shards in (1, 2, 4, 8)] == [2, 2, 4, 8]
    with pytest.raises(ConfigError, match="do not divide over 3 tensor shards"):
        spec.heads(3)
    with pytest.raises(ConfigError, match="width 50 does not divide over 4"):
        outline(models.make_spec(BASE | {"intermediate_size": 50}), 4, jnp.float32)


@pytest.mark.parametrize("tied", [False, True])
def test_what_a_checkpoint_may_hold_besides(tied: bool) -> None:
    spec = models.make_spec(BASE | {"tie_word_embeddings": tied})
    found = ignored(spec)
    assert ("lm_head.weight" in found) == tied
    assert found.get("lm_head.weight") == ("model.embed_tokens.weight" if tied else None)
    for name in ("rotary_emb.inv_freq", "q_scale", "k_scale", "attn.v_scale", "kv_scale"):
        for layer in range(2):
            assert found[f"model.layers.{layer}.self_attn.{name}"] is None
    used = {
        piece.name for rule in rules(spec, outline(spec, 1, "float32")) for piece in rule.pieces
    }
    assert not used & set(found)


@pytest.mark.parametrize(
    ("layers", "held"), [([], 0), ([0], 1), ([0, 1, 2], 3), ([0, 2], 1), ([1], 0)]
)
def test_the_layers_of_a_checkpoint_are_counted(layers: list[int], held: int) -> None:
    names = {f"model.layers.{layer}.input_layernorm.weight" for layer in layers}
    assert held_layers(models.make_spec(BASE), names | {"model.norm.weight"}) == held


@pytest.mark.parametrize("family", models.families())
def test_a_family_is_defaults_names_a_spec_and_a_build(family: str) -> None:
    module = models.family(family)
    required = {"model_type": family, "intermediate_size": 64, "num_hidden_layers": 2}
    required |= {"num_experts_per_tok": 2, "n_routed_experts": 64, "rotary_dim": 8}
    required |= {"attention_types": [[["global", "local"], 1]]}
    sizes = {"hidden_size": 256, "num_attention_heads": 32, "vocab_size": 100}
    spec = models.make_spec(required | sizes)
    assert (dict(module.DEFAULTS) | required | sizes).items() <= spec.config.items()
    assert spec.model_type == family and len(spec.layers) == 2
    patterns = {key for key in module.NAMES if "{}" in key}
    assert all("{}" in name for key in patterns for name in module.NAMES[key])
    assert not any(
        "{}" in name for key in set(module.NAMES) - patterns for name in module.NAMES[key]
    )
