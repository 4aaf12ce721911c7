"""What published models are made of: each key of their configs leads to the part that it names."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest

from jaxllm import models
from jaxllm.cache.layer import LatentKV, PagedKV
from jaxllm.models.config.build import outline, unused_prefixes
from jaxllm.models.config.spec import ModelSpec
from jaxllm.nn.attention import Attention
from jaxllm.nn.blocks import (
    Block,
    ParallelBlock,
    PostNormBlock,
    ResidualNormBlock,
    SandwichBlock,
    ScaledBlock,
)
from jaxllm.nn.decoder import Decoder
from jaxllm.nn.embedding import ScaledEmbedding
from jaxllm.nn.head_maps import Clipped, HeadLayerNorm, NormedHeads, TurnedNorms, WholeRMSNorm
from jaxllm.nn.logits import Scale, Softcap
from jaxllm.nn.mixture.experts import MixtureMLP, SharedExpert
from jaxllm.nn.mixture.routers import GroupLimit, Routing, normalised, softmax, unchanged
from jaxllm.nn.mlp import MLP, GatedMLP
from jaxllm.nn.norm import BareLayerNorm, LayerNorm, NoNorm, OffsetRMSNorm, RMSNorm
from tests.models.published import PUBLISHED


@functools.cache
def spec_of(name: str) -> ModelSpec:
    return models.make_spec(PUBLISHED[name])


@functools.cache
def model_of(name: str) -> Decoder:
    """The first layers of a model, without arrays; so many that every kind of layer is there."""
    model = outline(spec_of(name).first_layers(4), 1, jnp.bfloat16)
    assert isinstance(model, Decoder)
    return model


def attention_of(name: str, layer: int = 0) -> Attention:
    found = model_of(name).layers[layer].attention
    assert isinstance(found, Attention)
    return found


def routing_of(name: str, layer: int = 3) -> Routing:
    mlp = model_of(name).layers[layer].mlp
    assert isinstance(mlp, MixtureMLP)
    return mlp.router.routing


@pytest.mark.parametrize(
    ("name", "layers", "query", "cache"),
    [
        ("Llama-3.1-8B", 32, 32, PagedKV(8, 128, 128)),
        ("Qwen2.5-0.5B", 24, 14, PagedKV(2, 64, 64)),
        ("Qwen3-0.6B", 28, 16, PagedKV(8, 128, 128)),
        ("Gemma-2-9B", 42, 16, PagedKV(8, 256, 256, 4096)),
        ("Gemma-3-27B", 62, 32, PagedKV(16, 128, 128, 1024)),
        ("Phi-3-mini-128k", 32, 32, PagedKV(32, 96, 96, 262144)),
        ("gpt-oss-20b", 24, 64, PagedKV(8, 64, 64, 128)),
        ("DeepSeek-V2-Lite", 27, 16, LatentKV(512, 64)),
        ("DeepSeek-V3", 61, 128, LatentKV(512, 64)),
        ("Kimi-K2", 61, 64, LatentKV(512, 64)),
        ("GLM-4.5-Air", 46, 96, PagedKV(8, 128, 128)),
        ("MiniMax-M2", 62, 48, PagedKV(8, 128, 128)),
        ("GPT-NeoX-20B", 44, 64, PagedKV(64, 96, 96)),
        ("Falcon-7B", 32, 71, PagedKV(1, 64, 64)),
        ("BLOOM-7B1", 30, 32, PagedKV(32, 128, 128)),
        ("Falcon-40B", 60, 128, PagedKV(8, 64, 64)),
        ("ChatGLM3-6B", 28, 32, PagedKV(2, 128, 128)),
        ("Seed-OSS-36B", 64, 80, PagedKV(8, 128, 128)),
        ("ModernBERT-base", 22, 12, PagedKV(12, 64, 64)),
    ],
)
def test_a_layer_remembers_what_the_models_sizes_say(
    name: str, layers: int, query: int, cache: PagedKV | LatentKV
) -> None:
    spec = spec_of(name)
    assert (len(spec.layers), spec.query_heads) == (layers, query)
    layer = spec.layers[0]
    assert layer.living(layer.window).stored_at(None).unrounded(None) == cache


@pytest.mark.parametrize(
    ("name", "kind", "attention_norm", "norm"),
    [
        ("Llama-3.1-8B", Block, RMSNorm, RMSNorm),
        ("Gemma-2-9B", SandwichBlock, OffsetRMSNorm, OffsetRMSNorm),
        ("Gemma-3-27B", SandwichBlock, OffsetRMSNorm, OffsetRMSNorm),
        ("GLM-4-9B-0414", SandwichBlock, RMSNorm, RMSNorm),
        ("OLMo-1.7-7B", Block, BareLayerNorm, BareLayerNorm),
        ("OLMo-2-7B", PostNormBlock, RMSNorm, RMSNorm),
        ("OLMo-3-7B", PostNormBlock, RMSNorm, RMSNorm),
        ("EXAONE-4.0-32B", PostNormBlock, RMSNorm, RMSNorm),
        ("Granite-3.1-8B", ScaledBlock, RMSNorm, RMSNorm),
        ("Command-R", ParallelBlock, LayerNorm, LayerNorm),
        ("Command-R7B", ParallelBlock, LayerNorm, LayerNorm),
        ("GPT-J-6B", ParallelBlock, LayerNorm, LayerNorm),
        ("GPT-NeoX-20B", ParallelBlock, LayerNorm, LayerNorm),
        ("Falcon-7B", ParallelBlock, LayerNorm, LayerNorm),
        ("Phi-2", ParallelBlock, LayerNorm, LayerNorm),
        ("BLOOM-7B1", Block, LayerNorm, LayerNorm),
        ("MPT-7B", Block, LayerNorm, LayerNorm),
        ("DBRX", Block, LayerNorm, LayerNorm),
        ("FlexOlmo-7x7B-1T", PostNormBlock, RMSNorm, RMSNorm),
        ("Apertus-8B", Block, RMSNorm, RMSNorm),
        ("Helium-1-preview-2B", Block, RMSNorm, RMSNorm),
        ("VaultGemma-1B", Block, OffsetRMSNorm, OffsetRMSNorm),
        ("StableLM-2-1.6B", Block, LayerNorm, LayerNorm),
        ("StarCoder2-3B", Block, LayerNorm, LayerNorm),
        ("GPT-2", Block, LayerNorm, LayerNorm),
        ("OPT-125M", Block, LayerNorm, LayerNorm),
        ("OPT-350M", ResidualNormBlock, LayerNorm, NoNorm),
        ("Minitron-4B", Block, LayerNorm, LayerNorm),
        ("BGE-large-en", ResidualNormBlock, LayerNorm, NoNorm),
        ("BGE-M3", ResidualNormBlock, LayerNorm, NoNorm),
        ("gte-multilingual-base", ResidualNormBlock, LayerNorm, NoNorm),
        ("ModernBERT-base", Block, NoNorm, LayerNorm),
    ],
)
def test_norms_stand_where_the_family_has_them(
    name: str, kind: type[Block], attention_norm: type, norm: type
) -> None:
    model = model_of(name)
    assert {type(block) for block in model.layers} == {kind}
    assert isinstance(model.layers[0].attention_norm, attention_norm)
    assert isinstance(model.norm, norm)
    doubled = 2 if kind is ParallelBlock else 1
    assert spec_of(name).carry_width == doubled * spec_of(name).width


@pytest.mark.parametrize(
    ("name", "biases"),
    [
        ("Llama-3.1-8B", (False, False, False)),
        ("Qwen2.5-7B", (True, False, False)),
        ("Qwen3-8B", (False, False, False)),
        ("GPT-2", (True, True, True)),
        ("OPT-125M", (True, True, True)),
        ("GPT-J-6B", (False, False, True)),
        ("StarCoder", (True, True, True)),
        ("GPT-Neo-125M", (False, True, True)),
        ("GPT-NeoX-20B", (True, True, True)),
        ("StarCoder2-3B", (True, True, True)),
        ("StableLM-2-1.6B", (True, False, False)),
        ("Phi-2", (True, True, True)),
        ("BLOOM-7B1", (True, True, True)),
        ("MPT-7B", (False, False, False)),
        ("Apertus-8B", (False, False, False)),
        ("Falcon-7B", (False, False, False)),
        ("Seed-OSS-36B", (True, False, False)),
        ("ChatGLM3-6B", (True, False, False)),
        ("GLM-4-9B-0414", (True, False, False)),
        ("InternLM2.5-7B", (False, False, False)),
        ("Minitron-4B", (False, False, False)),
        ("BGE-large-en", (True, True, True)),
        ("ModernBERT-base", (False, False, False)),
        ("gte-multilingual-base", (True, True, True)),
    ],
)
def test_biases_are_those_of_the_checkpoint(name: str, biases: tuple[bool, bool, bool]) -> None:
    attention, mlp = attention_of(name), model_of(name).layers[0].mlp
    assert isinstance(mlp, MLP | GatedMLP)
    found = (attention.qkv, attention.out, mlp.down)
    assert tuple(linear.bias is not None for linear in found) == biases


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("Llama-3.1-8B", 128**-0.5),
        ("Gemma-2-9B", 256**-0.5),
        ("Gemma-2-27B", 144**-0.5),
        ("Gemma-3-27B", 168**-0.5),
        ("Granite-3.1-8B", 1 / 128),
        ("Phi-3-mini-128k", 96**-0.5),
        ("gpt-oss-20b", 1 / 8),
        ("GPT-2", 1 / 8),
        ("GPT-Neo-125M", 1.0),
    ],
)
def test_scores_have_the_models_own_scale(name: str, scale: float) -> None:
    assert [attention_of(name, layer).scale for layer in range(4)] == [pytest.approx(scale)] * 4


@pytest.mark.parametrize(
    ("name", "factor", "weight"),
    [("DeepSeek-V2-Lite", 40, 1.0), ("DeepSeek-V3", 40, 1.0), ("Kimi-K2", 32, 1.0)],
)
def test_latent_scores_grow_with_the_stretched_context(
    name: str, factor: float, weight: float
) -> None:
    grown = 0.1 * weight * math.log(factor) + 1
    for block in model_of(name).layers:
        assert block.attention.scale == pytest.approx(192**-0.5 * grown**2)
    assert spec_of(name).ropes[0].scale == pytest.approx(1)  # mscale / mscale_all_dim


@pytest.mark.parametrize(
    ("name", "maps"),
    [
        ("Llama-3.1-8B", ()),
        ("Gemma-2-9B", (Softcap(30.0),)),
        ("Gemma-3-27B", ()),
        ("Granite-3.1-8B", (Scale(1 / 16),)),
        ("Command-R", (Scale(0.0625),)),
        ("Command-R-plus", (Scale(0.8333333333333334),)),
        ("Command-R7B", (Scale(0.25),)),
    ],
)
def test_logits_are_capped_or_scaled(name: str, maps: tuple[object, ...]) -> None:
    assert model_of(name).logits_maps == maps


def test_scores_of_gemma_2_alone_are_capped() -> None:
    assert attention_of("Gemma-2-9B").softcap == attention_of("Gemma-2-27B").softcap == 50.0
    assert attention_of("Gemma-3-27B").softcap is None
    assert attention_of("Gemma-3-27B").q_norm is not None
    assert attention_of("Gemma-2-9B").q_norm is None


@pytest.mark.parametrize(
    ("name", "factor"),
    # As bfloat16 holds the root of the width
    [("Gemma-2-9B", 59.75), ("Gemma-2-2B", 48.0), ("Gemma-3-27B", 73.5), ("Granite-3.1-8B", 12.0)],
)
def test_embeddings_are_multiplied(name: str, factor: float) -> None:
    embed = model_of(name).embed
    assert isinstance(embed, ScaledEmbedding)
    assert embed.factor == factor


def test_the_residual_sums_of_granite_are_multiplied() -> None:
    for block in model_of("Granite-3.1-8B").layers:
        assert isinstance(block, ScaledBlock)
        assert block.factor == 0.22


@pytest.mark.parametrize(
    ("name", "kind"),
    [("OLMo-2-7B", WholeRMSNorm), ("MiniMax-M2", WholeRMSNorm), ("Command-R-plus", HeadLayerNorm)],
)
def test_query_and_key_heads_are_normed_by_maps(name: str, kind: type) -> None:
    attention = attention_of(name)
    assert isinstance(attention.head_map, NormedHeads)
    assert type(attention.head_map.q_norm) is type(attention.head_map.k_norm) is kind
    assert attention.q_norm is None


def test_other_maps_of_heads_are_those_of_the_family() -> None:
    assert attention_of("OLMo-1.7-7B").head_map == Clipped(8.0)
    assert attention_of("Command-R").head_map is None
    assert isinstance(attention_of("Hunyuan-7B").head_map, TurnedNorms)
    assert isinstance(attention_of("Hunyuan-A13B").head_map, TurnedNorms)


@pytest.mark.parametrize(
    ("name", "routing"),
    [
        ("Mixtral-8x7B", Routing(2)),
        ("Qwen3-30B-A3B", Routing(8)),
        ("Qwen1.5-MoE-A2.7B", Routing(4, weigh=unchanged)),
        ("Hunyuan-A13B", Routing(8)),
        ("MiniMax-M2", Routing(8, score=jax.nn.sigmoid, corrected=True)),
        ("gpt-oss-20b", Routing(4, score=unchanged, weigh=softmax, biased=True)),
        ("ERNIE-4.5-21B-A3B", Routing(6, corrected=True)),
        ("DeepSeek-V2-Lite", Routing(6, weigh=unchanged)),
        ("GLM-4.5-Air", Routing(8, score=jax.nn.sigmoid, corrected=True)),
        (
            "DeepSeek-V3",
            Routing(
                8,
                score=jax.nn.sigmoid,
                weigh=normalised,
                scale=2.5,
                limit=GroupLimit(8, 4, 2),
                corrected=True,
            ),
        ),
        ("Kimi-K2", Routing(8, score=jax.nn.sigmoid, scale=2.827, corrected=True)),
    ],
)
def test_experts_are_chosen_as_the_paper_says(name: str, routing: Routing) -> None:
    assert routing_of(name) == routing.shortest()


@pytest.mark.parametrize(
    ("name", "experts", "inner", "dense", "shared"),
    [
        ("Mixtral-8x7B", 8, 14336, 0, None),
        ("Qwen3-30B-A3B", 128, 768, 0, None),
        ("MiniMax-M2", 256, 1536, 0, None),
        ("Hunyuan-A13B", 64, 3072, 0, 3072),
        ("ERNIE-4.5-21B-A3B", 64, 1536, 1, 3072),
        ("GLM-4.5-Air", 128, 1408, 1, 1408),
        ("DeepSeek-V2-Lite", 64, 1408, 1, 2816),
        ("DeepSeek-V3", 256, 2048, 3, 2048),
        ("Kimi-K2", 384, 2048, 1, 2048),
    ],
)
def test_mixtures_begin_behind_the_dense_layers(
    name: str, experts: int, inner: int, dense: int, shared: int | None
) -> None:
    spec, blocks = spec_of(name), model_of(name).layers
    assert [isinstance(block.mlp, GatedMLP) for block in blocks] == [i < dense for i in range(4)]
    for block in blocks[:dense]:
        down = block.mlp.down.weight
        assert down.shape == (spec.width, spec.config["intermediate_size"])
    for block in blocks[dense:]:
        assert block.mlp.router.weight.shape == (experts, spec.width)
        assert block.mlp.experts.gate_up.weight.shape == (experts, 2 * inner, spec.width)
        assert block.mlp.experts.down.weight.shape == (experts, spec.width, inner)
        beside = block.mlp.shared
        assert (None if beside is None else beside.down.weight.shape[1]) == shared


def test_the_shared_expert_of_qwen_has_a_gate() -> None:
    shared = model_of("Qwen1.5-MoE-A2.7B").layers[0].mlp.shared
    assert isinstance(shared, SharedExpert)
    assert shared.gate.weight.shape == (1, 2048)
    assert shared.mlp.down.weight.shape == (2048, 5632)


def test_gpt_oss_has_sinks_and_windows_on_every_other_layer() -> None:
    model = model_of("gpt-oss-20b")
    assert spec_of("gpt-oss-20b").windows == (128, None) * 12
    for block in model.layers:
        assert block.attention.sinks.weight.shape == (64,)
        assert (block.mlp.experts.gating.alpha, block.mlp.experts.gating.limit) == (1.702, 7.0)
    assert attention_of("Llama-3.1-8B").sinks is None


@pytest.mark.parametrize(("name", "rank"), [("DeepSeek-V2-Lite", None), ("DeepSeek-V3", 1536)])
def test_queries_of_the_larger_model_pass_a_low_rank(name: str, rank: int | None) -> None:
    query = model_of(name).layers[0].attention.query
    assert (query.down.weight.shape[0] if hasattr(query, "down") else None) == rank


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("Llama-3.1-8B", "silu"),
        ("Gemma-2-9B", "gelu_pytorch_tanh"),
        ("GPT-2", "gelu_new"),
        ("GPT-NeoX-20B", "gelu_fast"),
        ("Pythia-1.4B", "gelu"),
        ("Minitron-4B", "relu2"),
        ("ModernBERT-base", "gelu"),
    ],
)
def test_the_activation_is_the_models(name: str, activation: str) -> None:
    assert spec_of(name).activation == activation


@pytest.mark.parametrize(
    ("name", "kind"),
    [("Falcon-7B", True), ("Falcon-40B", False), ("GPT-NeoX-20B", False), ("Command-R", True)],
)
def test_parts_beside_each_other_share_a_norm_or_have_two(name: str, kind: bool) -> None:
    assert [block.mlp_norm is None for block in model_of(name).layers] == [kind] * 4


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("DeepSeek-V3", ("model.layers.61.",)),
        ("GLM-4.5-Air", ("model.layers.46.",)),
        ("Kimi-K2", ()),
    ],
)
def test_layers_behind_the_last_predict_further_tokens(
    name: str, prefixes: tuple[str, ...]
) -> None:
    assert unused_prefixes(spec_of(name)) == prefixes
