"""Pooling models through the engine, against transformers and sentence-transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from jaxllm import models, weights
from jaxllm.config import ConfigError
from jaxllm.engine.pooling_engine import PoolingEngine
from jaxllm.mesh import make_mesh
from jaxllm.messages import GenerateRequest, PoolingRequest, RequestError
from jaxllm.pooled import PoolingParams, check_params, normalised
from jaxllm.prompt import Prompt
from jaxllm.sampling.options import SamplingParams
from pallas_kernels.segment_attention import reference as segment_attention
from tests.engine.pooled_goldens import (
    GOLDENS,
    RAW,
    assert_close,
    golden,
    make,
    params_of,
    pool,
    second_texts,
)
from tests.goldens.pooled_cases import CASES


@pytest.fixture(scope="module")
def embedder() -> PoolingEngine:
    return make("qwen3-embedding")


SLOW = ("nomic-bert-labels", "eurobert-labels")  # the other cases of their families are not


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
)
def test_vectors_are_those_of_the_reference_together_and_alone(case: str) -> None:
    engine, (prompts, vectors) = make(case), golden(case)
    raw, seconds = params_of(case), second_texts(case)
    assert_close(pool(engine, prompts, raw, seconds), vectors)
    engine.reset_prefix_cache()
    for index, (prompt, vector) in enumerate(zip(prompts, vectors, strict=True)):
        assert_close(pool(engine, [prompt], raw, seconds[index : index + 1]), [vector])


@pytest.mark.parametrize(
    "case", ["bert-mean", pytest.param("modernbert-cls", marks=pytest.mark.slow)]
)
def test_an_encoder_with_wider_heads_gives_the_same_vectors(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_attention, "head_dims", lambda pages: (12,), raising=False)
    engine, (prompts, vectors) = make(case), golden(case)
    assert "heads of 8 are stored as 12, with zeros" in engine.resolved.attention_reason
    assert_close(pool(engine, prompts, params_of(case), second_texts(case)), vectors)


def test_chunks_and_cached_prefixes_change_nothing() -> None:
    prompts, vectors = golden("qwen3-embedding")
    engine = make("qwen3-embedding", max_num_batched_tokens=32)
    assert_close(pool(engine, prompts), vectors)
    assert_close(pool(engine, prompts), vectors)
    assert engine.stats().prefix_hits > 0


OVER_DEVICES = ("qwen3-embedding", "bert-mean")


@pytest.mark.parametrize(
    ("case", "shards"),
    [
        pytest.param(
            case, shards, marks=[pytest.mark.slow] * (shards > 2 or case not in OVER_DEVICES)
        )
        for case in CASES
        for shards in (2, 4)
    ],
)
def test_shards_change_nothing(case: str, shards: int) -> None:
    prompts, vectors = golden(case)
    engine = make(case, tensor_parallel_size=shards)
    assert engine.runner.shapes.model.mesh.size == shards
    assert_close(pool(engine, prompts, params_of(case), second_texts(case)), vectors)


def test_a_pool_over_all_tokens_runs_whole_prompts() -> None:
    prompts, vectors = golden("llama-mean-dense")
    engine = make("llama-mean-dense", max_num_batched_tokens=160)
    assert_close(pool(engine, prompts[::-1] + prompts, RAW), vectors[::-1] + vectors)
    assert engine.stats().prefix_hits == 0
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        make("llama-mean-dense", max_num_batched_tokens=128)


def test_more_prompts_than_slots_and_pages_all_end(embedder: PoolingEngine) -> None:
    prompts, vectors = golden("qwen3-embedding")
    assert_close(pool(embedder, prompts * 5), vectors * 5)


def test_dimensions_cut_and_then_normalise(embedder: PoolingEngine) -> None:
    prompts, vectors = golden("qwen3-embedding")
    cut = pool(embedder, prompts, PoolingParams(dimensions=8))
    assert_close(cut, [normalised(vector[:8]) for vector in vectors])


@pytest.mark.parametrize(
    ("case", "params", "message"),
    [
        ("llama-mean-dense", PoolingParams(dimensions=8), "dimensions needs"),
        ("qwen3-embedding", PoolingParams(dimensions=33), "from 1 to 32"),
        ("qwen3-embedding", PoolingParams(dimensions=True), "from 1 to 32"),
        ("qwen3-reranker", PoolingParams(dimensions=1), "dimensions needs"),
    ],
    ids=["no-matryoshka", "too-long", "no-number", "classifier"],
)
def test_dimensions_that_the_model_lacks_are_refused(
    case: str, params: PoolingParams, message: str, embedder: PoolingEngine
) -> None:
    engine = embedder if case == "qwen3-embedding" else make(case)
    assert engine.resolved.pooling is not None
    with pytest.raises(RequestError, match=message):
        check_params(engine.resolved.pooling, params, 160)


def test_labels_get_probabilities() -> None:
    prompts, logits = golden("qwen2-classifier")
    engine = make("qwen2-classifier")
    assert engine.resolved.pooling is not None
    assert engine.resolved.pooling.labels == ("bad", "fair", "good")
    softmax = [np.exp(row) / np.exp(row).sum() for row in logits]
    assert_close(pool(engine, prompts), softmax)


def test_bad_requests_are_refused_and_disturb_nothing(embedder: PoolingEngine) -> None:
    prompts, vectors = golden("qwen3-embedding")
    for prompt, message in (
        ([], "empty"),
        ([5] * 161, "length is 160 tokens"),
        ([96], "token id 96"),
    ):
        with pytest.raises(RequestError, match=message):
            embedder.add(PoolingRequest(id="bad", prompt=Prompt(prompt)))
    with pytest.raises(RequestError, match="generates nothing"):
        embedder.add(GenerateRequest(id="x", prompt=Prompt([5]), params=SamplingParams()))
    assert len(pool(embedder, [[5] * 160])[0]) == 32  # as long as may be
    assert_close(pool(embedder, prompts), vectors)


def test_a_generating_engine_refuses_to_pool(make_engine: Callable[..., Any]) -> None:
    with pytest.raises(RequestError, match="pools nothing"):
        make_engine().add(PoolingRequest(id="x", prompt=Prompt([5])))


def test_an_aborted_request_gives_its_pages_back(embedder: PoolingEngine) -> None:
    embedder.add(PoolingRequest(id="x", prompt=Prompt([5] * 100)))
    embedder.abort("x")
    (delta,) = embedder.step()
    assert (delta.finish_reason, delta.pooled) == ("abort", None)
    embedder.scheduler.check()
    assert not embedder.has_work


def test_a_generating_checkpoint_pools_when_asked_to(tiny_dir: str) -> None:
    engine = make(tiny_dir, runner="pooling", load_format="dummy", max_model_len=128)
    (vector,) = pool(engine, [[5, 6, 7]])
    assert np.linalg.norm(vector) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", {"0": 1}, "not a list of modules"),
        ("modules.json", [{"type": "a.WordEmbeddings", "path": ""}], "WordEmbeddings"),
        ("modules.json", [{"type": "a.Dense", "path": "../x"}], "must lie beside it"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, "must be one of"),
        (
            "1_Pooling/config.json",
            {"pooling_mode": "mean", "include_prompt": False},
            "include_prom",
        ),
        ("2_Dense/config.json", {"in_features": 3, "out_features": 2}, "it gets 64"),
        ("2_Dense/config.json", {"in_features": 64, "out_features": 7}, "linear.weight has shape"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length"),
    ],
    ids=["list", "kind", "path", "mode", "instruction", "width", "shape", "length"],
)
def test_files_of_sentence_transformers_that_do_not_fit_are_named(
    name: str, content: Any, message: str, tmp_path: Path
) -> None:
    model = shutil.copytree(GOLDENS / "llama-mean-dense", tmp_path / "model")
    (model / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        make(model)


def test_sentence_transformers_limit_of_inputs_is_kept(tmp_path: Path) -> None:
    model = shutil.copytree(GOLDENS / "qwen3-embedding", tmp_path / "model")
    (model / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    assert make(model, max_model_len=None).resolved.max_model_len == 64


def test_tokens_of_a_reranker_are_named_by_their_texts(tmp_path: Path) -> None:
    model = shutil.copytree(GOLDENS / "qwen3-logit-score", tmp_path / "model")
    for name in ("modules.json", "1_LogitScore/config.json"):
        (model / name).unlink()
    vocabulary = {"no": 50, "yes": 40}
    Backend(WordLevel(vocabulary)).save(str(model / "tokenizer.json"))
    overrides = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    prompts, logits = golden("qwen3-logit-score")
    engine = make(model, hf_overrides=overrides)
    assert_close(pool(engine, prompts), [1 / (1 + np.exp(-row)) for row in logits])
    with pytest.raises(ConfigError, match="'maybe', which is no token"):
        make(model, hf_overrides={"classifier_from_token": ["maybe"]})


def test_an_encoder_caches_nothing_and_runs_whole_prompts() -> None:
    prompts, vectors = golden("bert-mean")
    engine = make("bert-mean", max_num_batched_tokens=160, max_num_seqs=3)
    assert all(array.size == 0 for arrays in engine.runner.kv for array in arrays.planes)
    assert_close(pool(engine, prompts * 3, None, second_texts("bert-mean") * 3), vectors * 3)
    assert engine.stats().prefix_hits == 0


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"runner": "generate"}, "is an encoder, which cannot generate"),
        ({"convert": "classify"}, "has no labels"),
        ({"tensor_parallel_size": 3}, "4 attention heads do not divide over 3 tensor shards"),
        ({"max_num_batched_tokens": 64}, "--max-num-batched-tokens"),
        ({"hf_overrides": {"position_embedding_type": "relative_key"}}, "must be absolute"),
        ({"hf_overrides": {"num_attention_heads": 5}}, "does not divide into 5 heads"),
    ],
    ids=["generate", "classify", "shards", "tokens", "positions", "heads"],
)
def test_what_an_encoder_cannot_do_is_one_error(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make("bert-mean", **wishes)


def test_older_names_of_norms_and_a_missing_prefix_are_read(tmp_path: Path) -> None:
    model = shutil.copytree(GOLDENS / "bert-pairs", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, old in ends.items():
        tensors = {name.replace(new, old): value for name, value in tensors.items()}
    tensors = {name.removeprefix("bert."): value for name, value in tensors.items()}
    save_file(tensors, model / "model.safetensors")
    prompts, vectors = golden("bert-pairs")
    found = pool(make(model), prompts, RAW, second_texts("bert-pairs"))
    assert_close(found, vectors)


def published(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """GTE's tensors under their makers' names: query, key and value in one, up before gate."""
    found = {
        name.replace("gte.", "new.", 1): value
        for name, value in tensors.items()
        if ".layers." not in name
    }
    for suffix in ("weight", "bias"):
        own, new = "gte.layers.0.{}." + suffix, "new.encoder.layer.0.{}." + suffix
        qkv = [tensors[own.format(f"self_attn.{each}_proj")] for each in "qkv"]
        found[new.format("attention.qkv_proj")] = np.concatenate(qkv)
        for old, name in (
            ("self_attn.o_proj", "attention.o_proj"),
            ("post_attention_layernorm", "attn_ln"),
            ("mlp.down_proj", "mlp.down_proj"),
            ("post_mlp_layernorm", "mlp_ln"),
        ):
            found[new.format(name)] = tensors[own.format(old)]
    halves = [tensors[f"gte.layers.0.mlp.{each}_proj.weight"] for each in ("up", "gate")]
    return found | {"new.encoder.layer.0.mlp.up_gate_proj.weight": np.concatenate(halves)}


def parameters(model: Path) -> dict[Any, np.ndarray]:
    """Every parameter of a checkpoint, by its path."""
    spec = models.read_spec(model)
    _, state = weights.load(model, weights.outline(spec, make_mesh(1), jnp.float32))
    return {path: np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(state)}


@pytest.mark.parametrize("prefix", ["new.", ""])
def test_gte_is_read_under_its_makers_names_as_transformers_writes_it(
    tmp_path: Path, prefix: str
) -> None:
    model = shutil.copytree(GOLDENS / "gte-labels", tmp_path / "model")
    file = model / "model.safetensors"
    tensors = published(load_file(file))
    save_file({name.replace("new.", prefix, 1): value for name, value in tensors.items()}, file)
    found, expected = parameters(model), parameters(GOLDENS / "gte-labels")
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value)


NOMIC = {
    "embeddings.LayerNorm": "emb_ln",
    "layers.": "encoder.layers.",
    "self_attn.o_proj": "attn.out_proj",
    "up_proj": "fc11",
    "gate_proj": "fc12",
    "down_proj": "fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}
NOMIC_CONFIG = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "auto_map": {"AutoModel": "somewhere--modeling_hf_nomic_bert.NomicBertModel"},
    "n_embd": 32,
    "n_inner": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 200,
    "vocab_size": 96,
    "type_vocab_size": 2,
    "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-5,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "prenorm": False,
}


def test_nomic_bert_is_read_as_its_makers_publish_it(tmp_path: Path) -> None:
    model = shutil.copytree(GOLDENS / "nomic-bert-mean", tmp_path / "model")
    expected, old = parameters(model), models.read_spec(model)
    tensors = load_file(model / "model.safetensors")
    for layer in range(2):
        parts = [tensors.pop(f"layers.{layer}.self_attn.{each}_proj.weight") for each in "qkv"]
        tensors[f"layers.{layer}.attn.Wqkv.weight"] = np.concatenate(parts)
    for new, own in NOMIC.items():
        tensors = {name.replace(new, own): value for name, value in tensors.items()}
    save_file(tensors, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(NOMIC_CONFIG))
    assert replace(models.read_spec(model), config={}) == replace(old, config={})
    found = parameters(model)
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value)
    with pytest.raises(ConfigError, match="prenorm is True; nomic_bert has False"):
        models.make_spec(NOMIC_CONFIG | {"prenorm": True})


@pytest.mark.parametrize(("kind", "head"), [("Sequence", "score"), ("Token", "classifier")])
def test_a_classifier_may_have_its_familys_own_keys_and_head(
    tmp_path: Path, kind: str, head: str
) -> None:
    hf = {"model_type": "gpt2", "architectures": [f"GPT2For{kind}Classification"]}
    (tmp_path / "config.json").write_text(
        json.dumps(hf | {"n_embd": 24, "n_layer": 1, "n_head": 2, "vocab_size": 64})
    )
    pooling = models.read_spec(tmp_path).pooling
    assert pooling is not None
    assert (pooling.maps[0].name, pooling.maps[0].inputs) == (head, 24)


def test_gte_is_read_as_its_makers_publish_it(tmp_path: Path) -> None:
    model = shutil.copytree(GOLDENS / "gte-labels", tmp_path / "model")
    hf = CASES["gte-labels"]["config.json"] | {
        "model_type": "new",
        "architectures": ["NewForSequenceClassification"],
        "auto_map": {"AutoModel": "somewhere--modeling.NewModel"},
        "rope_theta": 160000,
    }
    (model / "config.json").write_text(json.dumps(hf))
    file = model / "model.safetensors"
    save_file(published(load_file(file)), file)
    prompts, vectors = golden("gte-labels")
    assert_close(pool(make(model), prompts, RAW), vectors)
    scaled = {"rope_theta": 20000, "rope_scaling": {"type": "ntk", "factor": 8.0}}
    (rope,) = models.make_spec(hf | scaled).ropes
    turns = 160000 ** -(np.arange(0, 8, 2) / 8) / 8 ** (2 / 8)
    np.testing.assert_allclose(rope.inv_freq, turns, rtol=1e-6)
    with pytest.raises(ConfigError, match="logn_attention_scale"):
        make(model, hf_overrides={"logn_attention_scale": True})


def test_a_classifier_cannot_generate() -> None:
    with pytest.raises(ConfigError, match="cannot generate"):
        make("qwen2-classifier", runner="generate")
