"""What stands around a language model: wrappers that also see, ends, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxllm import models
from jaxllm.cache.arrays import page_bytes
from jaxllm.config import ConfigError
from jaxllm.models.config.build import outline, read_name
from jaxllm.models.config.spec import ModelSpec
from pallas_kernels.quantised import SCALE_DTYPE
from tests.models.published import PUBLISHED

WRAPPERS = ("Gemma-3-27B", "Mistral-Small-3.1")
SEEING = ("vision_tower.layer.weight", "multi_modal_projector.linear_1.weight")


def written(path: Path, name: str, generation: object = None, **others: Any) -> Path:
    """A directory with the config of a published model, with other values."""
    (path / "config.json").write_text(json.dumps(PUBLISHED[name] | others))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def token_bytes(spec: ModelSpec, dtype: str = "bfloat16") -> int:
    """Bytes that one token takes in the pages of all layers."""
    return sum(page_bytes(layer, 1, 1, jnp.dtype(dtype)) for layer in spec.layers)


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_language_model_of_a_wrapper_is_the_one_inside(name: str) -> None:
    outer, inner = PUBLISHED[name], PUBLISHED[name]["text_config"]
    whole, alone = models.make_spec(outer), models.make_spec(inner)
    assert whole.model_type == outer["model_type"]
    assert (whole.layers, whole.ropes, whole.width) == (alone.layers, alone.ropes, alone.width)
    assert (whole.query_heads, whole.inner_width) == (alone.query_heads, alone.inner_width)


@pytest.mark.parametrize("name", WRAPPERS)
def test_ends_inside_a_wrapper_do_not_hide_those_outside(name: str, tmp_path: Path) -> None:
    inner = PUBLISHED[name]["text_config"] | {"eos_token_id": 4}  # as transformers saves it
    path = written(tmp_path, name, {"eos_token_id": [6]}, text_config=inner, eos_token_id=[4, 5])
    assert models.read_spec(path).eos_token_ids == (4, 5, 6)


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ("language_model.model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.language_model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_older_and_newer_prefixes_of_a_wrapper_name_one_tensor(
    name: str, stored: str, read: str
) -> None:
    assert read_name(models.make_spec(PUBLISHED[name]), [stored])(stored) == read


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("prefix", ["", "model."], ids=["older", "newer"])
@pytest.mark.parametrize("tensor", SEEING)
def test_tensors_of_the_part_that_sees_are_not_read(name: str, prefix: str, tensor: str) -> None:
    stored = prefix + tensor
    assert read_name(models.make_spec(PUBLISHED[name]), [stored])(stored) is None


def test_a_checkpoint_of_the_body_alone_lacks_its_prefix_and_may_have_a_head_beside_it() -> None:
    stored = {"embed_tokens.weight", "norm.weight", "lm_head.weight"}
    common = read_name(models.make_spec(PUBLISHED["Llama-3.1-8B"]), stored)
    assert common("norm.weight") == "model.norm.weight"
    assert common("lm_head.weight") == "lm_head.weight"


def test_qwen3_moe_reads_the_number_of_experts_under_its_newer_key() -> None:
    hf = PUBLISHED["Qwen3-30B-A3B"] | {"num_hidden_layers": 1, "num_local_experts": 96}
    del hf["num_experts"]
    layer = outline(models.make_spec(hf), 1, "float32").layers[0]
    assert layer.mlp.experts.gate_up.shape[0] == 96


def test_gemma_3_caps_no_scores_whatever_its_configuration_says() -> None:
    hf = PUBLISHED["Gemma-3-1B"] | {"num_hidden_layers": 1, "attn_logit_softcapping": 50.0}
    assert outline(models.make_spec(hf), 1, "float32").layers[0].attention.softcap is None


def test_gemma_3_caps_logits_where_it_does_not_also_see() -> None:
    alone = PUBLISHED["Gemma-3-1B"] | {"num_hidden_layers": 1, "final_logit_softcapping": 4.0}
    inside = {"model_type": "gemma3", "text_config": alone}
    assert outline(models.make_spec(alone), 1, "float32").logits_maps
    assert not outline(models.make_spec(inside), 1, "float32").logits_maps


@pytest.mark.parametrize("tensor", SEEING)
def test_a_model_without_a_wrapper_reads_every_name_as_it_is(tensor: str) -> None:
    common = read_name(models.make_spec(PUBLISHED["Llama-3.1-8B"]), [tensor])
    assert common(tensor) == tensor


@pytest.mark.parametrize("name", WRAPPERS)
def test_sizes_of_the_part_that_sees_never_reach_the_language_model(name: str) -> None:
    spec = models.make_spec(PUBLISHED[name])
    other = PUBLISHED[name] | {"vision_config": {"hidden_size": 7, "num_hidden_layers": "x"}}
    assert models.make_spec(other).layers == spec.layers
    assert models.make_spec(other).width == spec.width == spec.config["hidden_size"]


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_tied_head_is_what_the_wrapper_says(name: str) -> None:
    for tied in (True, False):
        inner = PUBLISHED[name]["text_config"] | {"tie_word_embeddings": not tied}
        outer = PUBLISHED[name] | {"text_config": inner, "tie_word_embeddings": tied}
        assert models.make_spec(outer).tied is tied


def test_the_model_inside_must_be_of_a_type_that_is_read() -> None:
    name = next(name for name in WRAPPERS if PUBLISHED[name]["model_type"] == "mistral3")
    inner = PUBLISHED[name]["text_config"] | {"model_type": "llama"}
    with pytest.raises(ConfigError, match="must be 'mistral' or 'ministral3'"):
        models.make_spec(PUBLISHED[name] | {"text_config": inner})


@pytest.mark.parametrize("name", WRAPPERS)
def test_absurd_sizes_inside_a_wrapper_are_refused(tmp_path: Path, name: str) -> None:
    inner = PUBLISHED[name]["text_config"] | {"hidden_size": 2**31}
    with pytest.raises(ConfigError, match="hidden_size is 2147483648; at most"):
        models.read_config(written(tmp_path, name, text_config=inner))


@pytest.mark.parametrize("name", [*WRAPPERS, "Llama-3.1-8B", "DeepSeek-V3"])
@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", "hqq", "nothing-known"])
def test_a_method_that_is_not_read_is_refused_by_its_name(
    tmp_path: Path, name: str, method: str
) -> None:
    path = written(tmp_path, name, quantization_config={"quant_method": method})
    with pytest.raises(ConfigError, match=rf"quantization_config \({method}\)") as error:
        models.read_config(path)
    assert "use another or an unquantized checkpoint" in str(error.value)


@pytest.mark.parametrize(
    "given", [{"bits": 4}, {"quant_method": None, "bits": 4}], ids=["absent", "null"]
)
def test_a_quantisation_without_a_method_is_refused(tmp_path: Path, given: object) -> None:
    path = written(tmp_path, "Llama-3.1-8B", quantization_config=given)
    with pytest.raises(ConfigError, match=r"quantization_config \(unknown method\)"):
        models.read_config(path)


@pytest.mark.parametrize("given", [None, {}], ids=["null", "empty"])
def test_an_empty_quantisation_is_none(tmp_path: Path, given: object) -> None:
    spec = models.read_spec(written(tmp_path, "Llama-3.1-8B", quantization_config=given))
    assert (spec.scheme, spec.kv_cache_dtype) == (None, "auto")


def test_every_reason_to_refuse_a_config_is_said_at_once(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "Llama-3.1-8B",
        model_type="unheard",
        auto_map={"AutoModel": "mine.Mine"},
        quantization_config={"quant_method": "gptq"},
    )
    with pytest.raises(ConfigError) as error:
        models.read_config(path)
    for reason in ("auto_map", "(gptq)", "'unheard'"):
        assert reason in str(error.value)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (2, None, (2,)),
        (2, {}, (2,)),
        (2, {"eos_token_id": None}, (2,)),
        (2, {"eos_token_id": 2}, (2,)),
        (2, {"eos_token_id": [9, 2, 5]}, (2, 5, 9)),
        ([9, 2], {"eos_token_id": 5}, (2, 5, 9)),
        (None, {"eos_token_id": 5}, (5,)),
        (None, {"eos_token_id": []}, ()),
        (0, {"eos_token_id": 0}, (0,)),
        (2, {"temperature": 0.6, "pad_token_id": 7}, (2,)),
    ],
    ids=range(10),
)
def test_generation_config_may_add_ends_and_take_none_away(
    tmp_path: Path, config: object, generation: object, ends: tuple[int, ...]
) -> None:
    path = written(tmp_path, "Llama-3.1-8B", generation, eos_token_id=config)
    assert models.read_spec(path).eos_token_ids == ends


@pytest.mark.parametrize("end", ["2", 2.0, True, [[2]], ["</s>"], {"id": 2}], ids=range(6))
def test_an_end_that_is_no_integer_is_refused_in_either_file(tmp_path: Path, end: object) -> None:
    with pytest.raises(ConfigError, match=r"eos_token_id is .*; it must be an integer"):
        models.read_spec(written(tmp_path, "Llama-3.1-8B", {"eos_token_id": end}))
    with pytest.raises(ConfigError, match=r"eos_token_id is .*; it must be an integer"):
        models.make_spec(PUBLISHED["Llama-3.1-8B"] | {"eos_token_id": end})


def test_ends_of_a_wrapper_stand_outside_and_join_those_of_generation(tmp_path: Path) -> None:
    assert models.make_spec(PUBLISHED["Gemma-3-27B"]).eos_token_ids == (1, 106)
    path = written(tmp_path, "Gemma-3-27B", {"eos_token_id": [1, 107]})
    assert models.read_spec(path).eos_token_ids == (1, 106, 107)


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("Llama-2-7B", 128),
        ("Qwen2.5-0.5B", 64),
        ("Phi-3-mini", 96),
        ("Phi-4", 128),
        ("GPT-NeoX-20B", 96),
        ("Falcon-7B", 64),
        ("SmolLM3-3B", 128),
        ("Granite-3.1-8B", 128),
    ],
)
def test_a_head_is_as_wide_as_the_stream_over_the_heads(name: str, dim: int) -> None:
    spec = models.make_spec(PUBLISHED[name])
    assert spec.heads(1).dim == dim == spec.width // spec.query_heads


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("Qwen3-0.6B", 128),
        ("Gemma-2-2B", 256),
        ("Gemma-3-27B", 128),
        ("Mistral-Small-3.1", 128),
        ("GLM-4.5-Air", 128),
        ("ERNIE-4.5-0.3B", 128),
        ("gpt-oss-20b", 64),
        ("Seed-OSS-36B", 128),
    ],
)
def test_a_given_width_of_heads_wins_over_the_derived_one(name: str, dim: int) -> None:
    spec = models.make_spec(PUBLISHED[name])
    assert spec.heads(1).dim == dim != spec.width // spec.query_heads


@pytest.mark.parametrize(("given", "dim"), [(None, 128), (128, 128), (64, 64), (256, 256)])
def test_a_null_width_is_derived(given: int | None, dim: int) -> None:
    spec = models.make_spec(PUBLISHED["Llama-2-7B"] | {"head_dim": given})
    assert {layer.key_dim for layer in spec.layers} == {dim}


@pytest.mark.parametrize("given", [0, -128, 127, 128.0, "128", True], ids=range(6))
def test_a_width_of_heads_that_cannot_be_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="head_dim is "):
        models.make_spec(PUBLISHED["Llama-2-7B"] | {"head_dim": given})


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Llama-2-7B", 2 * 32 * 32 * 128 * 2),
        ("Llama-3.1-8B", 128 * 1024),
        ("Llama-3.2-1B", 32 * 1024),
        ("Mistral-7B-v0.1", 128 * 1024),
        ("Qwen2.5-0.5B", 12 * 1024),
        ("Qwen2.5-7B", 56 * 1024),
        ("Qwen3-0.6B", 112 * 1024),
        ("Qwen3-8B", 144 * 1024),
        ("Qwen3-30B-A3B", 96 * 1024),
        ("gpt-oss-20b", 48 * 1024),
        ("Falcon-7B", 8 * 1024),
        ("ChatGLM3-6B", 28 * 1024),
        ("Mistral-Small-3.1", 160 * 1024),
        ("Gemma-3-27B", 496 * 1024),
        ("DeepSeek-V2-Lite", 27 * 576 * 2),
        ("DeepSeek-V3", 61 * 576 * 2),
        ("Kimi-K2", 61 * 576 * 2),
    ],
)
def test_a_token_takes_the_bytes_that_the_models_sizes_say(name: str, size: int) -> None:
    assert token_bytes(models.make_spec(PUBLISHED[name])) == size


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen2.5-0.5B", "Gemma-3-27B"])
def test_8_bit_pages_take_half_and_a_scale_for_each_key_and_value(name: str) -> None:
    spec = models.make_spec(PUBLISHED[name])
    scales = 2 * len(spec.layers) * spec.layers[0].heads * SCALE_DTYPE.itemsize
    assert token_bytes(spec, "float8_e4m3fn") == token_bytes(spec) // 2 + scales
