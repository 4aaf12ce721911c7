"""A checkpoint's own scales of keys and values: found under every name, used for pages of 8 bits,
refused where they are nonsense."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import models, weights
from jaxllm.config import ConfigError
from jaxllm.engine.engine import Engine
from jaxllm.mesh import make_mesh
from jaxllm.sampling.options import SamplingParams
from tests.by_layer import by_layer
from tests.engine.conftest import Outcome, outcomes
from tests.engine.startup.test_start_table import Kept
from tests.engine.test_invariants import PROMPTS
from tests.goldens.golden import load_golden

MakeEngine = Callable[..., Engine]
LLAMA = load_golden("llama-gqa").directory  # two layers
HEADS = 2  # of keys, and of values
SOME = PROMPTS[1::2]
PARAMS = [SamplingParams(temperature=1.0, seed=7, max_tokens=8, ignore_eos=True, logprobs=3)] * len(
    SOME
)
# Of each layer's keys and values
SCALES = np.array([[0.083, 0.0213], [0.0911, 0.0341]], np.float32)
STORED = np.asarray(jnp.asarray(SCALES, jnp.bfloat16), np.float32)
BY_HEAD = SCALES[..., None] * np.array([1, 1.75], np.float32)


def checkpoint(path: Path, extra: dict[str, Any], **config: Any) -> str:
    """The tiny Llama with more tensors in layers named by number, and more in config.json."""
    tensors = load_file(LLAMA / "model.safetensors")
    tensors |= {
        f"model.layers.{name}": np.asarray(value, np.float32) for name, value in extra.items()
    }
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(
        json.dumps(json.loads((LLAMA / "config.json").read_text()) | config)
    )
    return str(path)


def named(key: str, value: str, layers: int = 2, shape: tuple[int, ...] = ()) -> dict[str, Any]:
    names = [
        (f"{layer}.self_attn.{name}", SCALES[layer, side])
        for layer in range(layers)
        for side, name in enumerate((key, value))
    ]
    return {name: np.full(shape, scale) for name, scale in names}


def by_head(shape: tuple[int, ...]) -> dict[str, Any]:
    names = [
        (layer, side, f"{layer}.self_attn.{name}")
        for layer in range(2)
        for side, name in enumerate(("k_scale", "v_scale"))
    ]
    return {name: BY_HEAD[layer, side].reshape(shape) for layer, side, name in names}


def served(make_engine: MakeEngine, model: str, **overrides: Any) -> tuple[list[Outcome], Engine]:
    engine = make_engine(model=model, load_format="auto", kv_cache_dtype="fp8", **overrides)
    found = outcomes(engine, SOME, PARAMS)
    engine.scheduler.check()
    return found, engine


@pytest.mark.parametrize(
    ("key", "value", "shape"),
    [
        ("k_scale", "v_scale", ()),
        ("attn.k_scale", "attn.v_scale", (1,)),
        ("k_proj.k_scale", "v_proj.v_scale", (1, 1)),
        ("k_proj.output_scale", "v_proj.output_scale", ()),
    ],
)
def test_scales_are_found_under_every_name(
    tmp_path: Path, key: str, value: str, shape: tuple[int, ...]
) -> None:
    path = checkpoint(tmp_path, named(key, value, shape=shape))
    names = [
        tuple((f"model.layers.{i}.self_attn.{name}", shape) for name in (key, value))
        for i in range(2)
    ]
    assert weights.kv_scales(path, 2, HEADS) == names
    assert weights.kv_scales(path, 2, HEADS, "dummy") == []


def test_one_scale_may_be_for_keys_and_values(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, {"1.self_attn.kv_scale": SCALES[1, 0]})
    assert weights.kv_scales(path, 2, HEADS) == [
        None,
        (("model.layers.1.self_attn.kv_scale", ()),) * 2,
    ]
    assert weights.kv_scales(LLAMA, 2, HEADS) == []


def test_pages_are_written_by_the_checkpoints_scales(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path, named("k_scale", "v_scale") | {"0.self_attn.q_scale": 1})
    report = Kept()
    alone, engine = served(make_engine, path, enable_prefix_caching=False, report=report)
    for layer, pool in enumerate(by_layer(engine.runner.kv)[2]):
        written = np.asarray(pool, np.float32)
        for side in range(2):
            assert set(np.unique(written[:, :, side])) == {np.float32(0), STORED[layer, side]}
    assert report.rows["KV scales"] == "the checkpoint's"
    own, _ = served(make_engine, str(LLAMA))
    for found, other in zip(alone, own, strict=True):
        assert found.logprobs[0].top != other.logprobs[0].top, (
            "a token's own scale gives something else"
        )
        assert abs(found.logprobs[0].logprob - other.logprobs[0].logprob) < 1


@pytest.mark.parametrize("shards", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_each_head_is_written_by_its_own_scale(
    make_engine: MakeEngine, tmp_path: Path, shards: int
) -> None:
    path, prompts_alone = (
        checkpoint(tmp_path, by_head((HEADS, 1, 1))),
        [SamplingParams(temperature=0, max_tokens=1)] * len(SOME),
    )
    pools = []
    for dtype in ("fp8", "auto"):
        engine = make_engine(
            model=path, load_format="auto", kv_cache_dtype=dtype, tensor_parallel_size=shards
        )
        outcomes(engine, SOME, prompts_alone)
        pools.append(engine.runner.kv)
    narrow, exact = pools
    stored = np.asarray(jnp.asarray(BY_HEAD, jnp.bfloat16), np.float32).repeat(
        max(1, shards // HEADS), axis=2
    )
    k, v, own = by_layer(narrow)
    for pool, scales in zip(own, stored, strict=True):
        found = np.asarray(pool, np.float32)  # [P, heads, 2, C]
        assert ((found == 0) | (found == scales.T[:, :, None])).all() and (
            found > 0
        ).sum() == 2 * len(scales.T) * sum(map(len, SOME))
    # What the first layer writes depends on no page.
    for side, (pages, wide) in enumerate(
        zip((k[0], v[0]), (x[0] for x in by_layer(exact)), strict=True)
    ):
        scale = np.asarray(own[0], np.float32)[:, :, side, :, None]
        rounded, wanted = np.asarray(pages, np.float32) * scale, np.asarray(wide, np.float32)
        assert (np.abs(rounded - wanted) <= np.abs(wanted) / 16 + scale * 2.0**-10).all() and (
            wanted != 0
        ).any()


@pytest.mark.parametrize(
    "how",
    [
        {"max_num_batched_tokens": 16},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_request_gets_the_same_however_it_is_run(
    make_engine: MakeEngine, tmp_path: Path, how: dict[str, Any]
) -> None:
    path = checkpoint(tmp_path, named("k_scale", "v_scale"))
    alone, _ = served(
        make_engine, path, max_num_seqs=1, async_scheduling=False, enable_prefix_caching=False
    )
    for found, expected in zip(served(make_engine, path, **how)[0], alone, strict=True):
        found.assert_like(expected)


def test_layers_without_scales_compute_theirs(make_engine: MakeEngine, tmp_path: Path) -> None:
    report = Kept()
    _, engine = served(
        make_engine, checkpoint(tmp_path, named("k_scale", "v_scale", layers=1)), report=report
    )
    first, second = (np.asarray(pool, np.float32) for pool in by_layer(engine.runner.kv)[2])
    assert set(np.unique(first[:, :, 0])) == {0, STORED[0, 0]}
    assert len(np.unique(second[:, :, 0])) > 2
    assert (
        report.rows["KV scales"]
        == "the checkpoint's for 1 of 2 layers; for the others one for each token and head, computed when it is written"
    )


def test_pages_of_full_precision_have_nothing_to_do_with_them(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    report = Kept()
    engine = make_engine(
        model=checkpoint(tmp_path, named("k_scale", "v_scale")), load_format="auto", report=report
    )
    assert len(engine.runner.weights) == len(
        make_engine(model=str(LLAMA), load_format="auto").runner.weights
    )
    assert "KV scales" not in report.rows


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": SCHEME,
}
MODELOPT: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": None,
    "kv_cache_quant_algo": "FP8",
    "exclude_modules": ["lm_head"],
}
OWN = {
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
}
WIDE = {
    "weights": None,
    "input_activations": None,
    "output_activations": None,
    "targets": ["Linear"],
}
MORE = [  # what makes one that cannot be served of them
    (COMPRESSED, {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}),
    (
        COMPRESSED,
        {"config_groups": {"group_0": WIDE, "group_1": WIDE | {"input_activations": SCHEME}}},
    ),
    (COMPRESSED, {"config_groups": ["group_0"]}),
    (COMPRESSED, {"kv_cache_scheme": None}),
    (COMPRESSED, {"kv_cache_scheme": SCHEME | {"type": "int"}}),
    (COMPRESSED, {"kv_cache_scheme": SCHEME | {"num_bits": 4}}),
    (COMPRESSED, {"quant_method": "fp8"}),
    (MODELOPT, {"quant_algo": "FP8"}),
    (MODELOPT, {"kv_cache_quant_algo": "NVFP4"}),
    (MODELOPT, {"kv_cache_quant_algo": []}),
    (COMPRESSED, {"kv_cache_scheme": None, "kv_cache_quant_algo": "INT8"}),
    (MODELOPT, {"kv_cache_scheme": SCHEME, "quant_algo": "NVFP4"}),
    (MODELOPT, {"kv_cache_scheme": SCHEME | {"num_bits": 4}}),
    (OWN, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}),
    (OWN, {"quant_method": "fp8"}),
    (OWN, {"quant_algo": "FP8"}),
    (COMPRESSED, {"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}}),
    (COMPRESSED, {"sparsity_config": {"format": "sparse-24-bitmask"}}),
]


@pytest.mark.parametrize(
    "asked",
    [
        COMPRESSED,
        COMPRESSED | {"config_groups": {"group_0": WIDE}},
        MODELOPT,
        {
            "quant_method": "modelopt",
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "producer": OWN["producer"],
        },
        OWN,
    ],
)
def test_a_configuration_may_quantise_keys_and_values_alone(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    read = models.read_spec(checkpoint(tmp_path, {}, quantization_config=asked))
    assert read.kv_cache_dtype == "fp8_e4m3"
    path = checkpoint(tmp_path, {})
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(asked))
    assert models.read_config(path)["quantization_config"] == asked
    for nothing in (
        OWN | {"quantization": {"quant_algo": None, "kv_cache_quant_algo": None}},
        MODELOPT | {"kv_cache_quant_algo": None},
    ):
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(nothing))
        assert models.read_spec(path).kv_cache_dtype == "auto"


@pytest.mark.parametrize(("asked", "more"), MORE)
def test_a_configuration_that_quantises_more_is_refused(
    tmp_path: Path, asked: dict[str, Any], more: dict[str, Any]
) -> None:
    path = checkpoint(tmp_path, {}, quantization_config=asked | more)
    with pytest.raises(
        ConfigError,
        match=r"quantization_config \(.*\) is not supported; .* keys and values alone, to FP8",
    ):
        models.read_config(path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(asked | more))
    with pytest.raises(ConfigError, match=r"hf_quant_config.json \(.*\) is not supported"):
        models.read_config(checkpoint(tmp_path, {}))


def test_pages_are_what_the_checkpoint_wants_unless_somebody_asks_otherwise(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    path, plain = (
        checkpoint(
            tmp_path, named("k_proj.k_scale", "v_proj.v_scale"), quantization_config=MODELOPT
        ),
        str(LLAMA),
    )
    found = {}
    for asked, model in (("auto", path), ("fp8", path), ("float32", path), ("auto", plain)):
        report = Kept()
        engine = make_engine(model=model, load_format="auto", kv_cache_dtype=asked, report=report)
        found[asked, model] = (
            engine.resolved.kv_dtype,
            report.rows.get("KV scales"),
            len(engine.runner.weights),
        )
    assert (
        found["auto", path]
        == found["fp8", path]
        == ("float8_e4m3fn", "the checkpoint's", found["auto", plain][2] + 2)
    )
    assert (
        found["float32", path] == found["auto", plain] == ("float32", None, found["auto", plain][2])
    )
    with pytest.raises(
        ConfigError,
        match=r"--kv-cache-dtype bfloat16 is neither of 8 bits .* give float32, fp8 or auto, or --dtype bfloat16",
    ):
        make_engine(model=path, load_format="auto", kv_cache_dtype="bfloat16")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"0.self_attn.k_scale": 1.0},
            r"has model\.layers\.0\.self_attn\.k_scale, but not the other of .*k_scale and .*v_scale",
        ),
        (
            {"0.self_attn.k_scale": np.ones(3), "0.self_attn.v_scale": 1.0},
            r"k_scale is F32 \[3\]; numbers of .*, one for all of a layer's KV heads or one for each of the 2;",
        ),
        (
            {"0.self_attn.k_scale": np.ones((2, 8)), "0.self_attn.v_scale": 1.0},
            r"k_scale is F32 \[2, 8\]; numbers of",
        ),
        (
            {"0.self_attn.k_scale": [1, 0], "0.self_attn.v_scale": 1.0},
            r"k_scale is 0\.0; a scale lies between",
        ),
        (
            {"0.self_attn.k_scale": 0.0, "0.self_attn.v_scale": 1.0},
            r"k_scale is 0\.0; a scale lies between",
        ),
        (
            {"0.self_attn.k_scale": 1.0, "0.self_attn.v_scale": np.nan},
            r"v_scale is nan; a scale lies between",
        ),
        (
            {"0.self_attn.k_scale": 1.0, "0.self_attn.v_scale": np.inf},
            r"v_scale is inf; a scale lies between",
        ),
    ],
)
def test_scales_that_cannot_be_used_are_refused(
    make_engine: MakeEngine, tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    path = checkpoint(tmp_path, extra)
    with pytest.raises(ConfigError, match=message + r".*give the model's type as --kv-cache-dtype"):
        make_engine(model=path, load_format="auto", kv_cache_dtype="fp8")
    assert (
        make_engine(model=path, load_format="auto", kv_cache_dtype="float32").resolved.kv_dtype
        == "float32"
    )


def test_processes_that_lower_are_told_of_the_scales(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, named("k_scale", "v_scale", shape=(1,)))
    spec = models.read_spec(path).with_scales(weights.kv_scales(path, 2, HEADS))
    sent = models.make_spec(**json.loads(json.dumps(spec.to_dict())))
    assert sent == spec
    here, there = (weights.abstract(each, make_mesh(2), jnp.bfloat16) for each in (spec, sent))
    assert here[0] == there[0]
    assert jax.tree.structure(here[1]) == jax.tree.structure(there[1])
    assert [leaf.sharding for leaf in jax.tree.leaves(here[1])] == [
        leaf.sharding for leaf in jax.tree.leaves(there[1])
    ]
    assert sum(leaf.shape == (HEADS, 2) for leaf in jax.tree.leaves(here[1])) == 2


@pytest.mark.parametrize("shape", [(HEADS,), (HEADS, 1, 1), (1, HEADS, 1), ()])
def test_every_shard_gets_the_scales_of_its_heads(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = checkpoint(tmp_path, by_head(shape) if shape else named("k_scale", "v_scale"))
    spec = models.read_spec(path).with_scales(weights.kv_scales(path, 2, HEADS))
    _, state = weights.load(path, spec, make_mesh(4), jnp.float32)
    wanted = jnp.asarray(
        BY_HEAD if shape else SCALES[..., None].repeat(HEADS, axis=-1), jnp.bfloat16
    )
    found = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.bfloat16]
    for layer, leaf in enumerate(found):
        np.testing.assert_array_equal(
            leaf, wanted[layer].repeat(2, axis=1).T, err_msg="each head serves two shards"
        )
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(1, 2)}
    assert len(found) == 2
