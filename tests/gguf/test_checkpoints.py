"""A GGUF file is the checkpoint that it was converted from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import weights
from jaxllm.config import ConfigError
from jaxllm.gguf.architecture import architecture, checkpoint_tensors
from jaxllm.gguf.architectures.gemma2 import score_width
from jaxllm.gguf.directory import model_directory
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.model import open_model
from jaxllm.locate import locate
from jaxllm.mesh import make_mesh
from jaxllm.models import ModelSpec, read_spec
from jaxllm.models.config.read import family
from jaxllm.quantisation import WeightFormat
from pallas_kernels.int4_matmul.packed import Int4, dequantised
from tests.gguf.converted import converted
from tests.gguf.writer import Q4_0, Q4_K, Q8_0, Stored, plain, quantised, random_blocks
from tests.goldens.golden import HERE

# Architectures that tokens are compared of, too
FURTHER = (
    ("stablelm-head-norms", "stablelm"),
    ("nemotron-biases", "nemotron"),
    ("olmo-clip", "olmo"),
    ("olmo3-yarn-window", "olmo2"),
    ("hunyuan-v1-moe", "hunyuan-moe"),
    ("gpt_neox-parallel", "gptneox"),
    ("gpt2-tied", "gpt2"),
    ("chatglm-groups", "chatglm"),
    ("llama-gqa", "internlm2"),
    ("llama-llama3", "exaone"),
)
CASES = [
    ("llama-gqa", "llama"),
    ("llama-llama3", "llama"),
    ("llama-yarn", "llama"),
    ("llama-mqa-tied-linear", "llama"),
    ("mixtral-experts", "llama"),
    ("qwen2-tied", "qwen2"),
    ("qwen3-gqa", "qwen3"),
    ("qwen3-moe-normalised", "qwen3moe"),
    ("gemma2-window", "gemma2"),
    ("gemma3_text-older-keys", "gemma3"),
    ("phi3-long", "phi3"),
    ("granite-multipliers", "granite"),
    ("olmo2-biases", "olmo2"),
    ("gpt-oss-fused", "gpt-oss"),
    ("deepseek-v2-lite", "deepseek2"),
    ("deepseek-v3-groups", "deepseek2"),
    ("seed_oss-biases", "seed_oss"),
    ("glm4-quarter", "glm4"),
    ("glm4-moe-groups", "glm4moe"),
    ("ernie4_5-biases", "ernie4_5"),
    ("ernie4-5-moe", "ernie4_5-moe"),
    ("hunyuan_v1_dense-alpha", "hunyuan-dense"),
    ("minimax-m2-rotary-dim", "minimax-m2"),
    ("cohere-head-norms", "command-r"),
    ("exaone4-window", "exaone4"),
    ("arcee-biases", "arcee"),
    ("ministral3-growing-queries", "mistral3"),
    ("granitemoe-multipliers", "granitemoe"),
    ("granitemoeshared-multipliers", "granitemoe"),
    *FURTHER,
    ("stablelm-parallel", "stablelm"),
]
# Whose configurations have what files do not state
TENSORS = [
    *CASES,
    ("smollm3-positions", "smollm3"),
    ("qwen2-moe-shared", "qwen2moe"),
    ("gemma-gelu", "gemma"),
    ("mistral-full-mqa", "mistral3"),
    ("olmoe-clip", "olmoe"),
    ("cohere2-window", "cohere2"),
    ("starcoder2-window", "starcoder2"),
    ("dots1-window", "dots1"),
    ("gpt_neox-sequential", "gptneox"),
]
# Compared as ropes and fields of the spec
ELSEWHERE = {
    *("rope_scaling", "rope_parameters", "rope_theta", "eos_token_id", "dtype"),
    *("sliding_window", "max_window_layers", "sliding_window_pattern"),
    *("query_pre_attn_scalar", "architectures"),  # not in files, see below
}


@pytest.mark.parametrize(("name", "architecture"), TENSORS)
def test_tensors_are_those_of_the_checkpoint(name: str, architecture: str, tmp_path: Path) -> None:
    path = converted(name, architecture, tmp_path / "model.gguf")
    found = checkpoint_tensors(open_model(path))
    expected = load_file(HERE / name / "model.safetensors")
    assert sorted(found) == sorted(expected)
    for tensor, values in expected.items():
        off = architecture.startswith(("gemma", "nemotron")) and "norm" in tensor
        bound = 1e-6 if off else 0  # one was added, and taken off
        np.testing.assert_allclose(np.asarray(found[tensor]), values, atol=bound, rtol=0)


@pytest.mark.parametrize(("name", "architecture"), CASES)
def test_the_configuration_means_the_same(name: str, architecture: str, tmp_path: Path) -> None:
    path = converted(name, architecture, tmp_path / "model.gguf")
    found = read_spec(model_directory(path, str(tmp_path))[0])
    expected = read_spec(HERE / name)
    plain = {"config": {}, "ropes": (), "stored_dtype": None}
    assert replace(found, **plain) == replace(expected, **plain)
    own = family(found.model_type).DEFAULTS
    mine, theirs = ({**own, **spec.config} for spec in (found, expected))
    keys = mine.keys() & theirs.keys() - ELSEWHERE
    assert {key: mine[key] for key in keys} == {key: theirs[key] for key in keys}
    positions = jnp.array([0, 1, 7, 63])
    for one, other in zip(found.ropes, expected.ropes, strict=True):
        both = zip(one(positions, None)[:2], other(positions, None)[:2], strict=True)
        for cos_or_sin in both:
            np.testing.assert_allclose(*cos_or_sin, atol=1e-5)


def test_yarn_turns_as_its_betas_say(tmp_path: Path) -> None:
    path = converted(name := "mistral-window-yarn", "mistral3", tmp_path / "model.gguf")
    found = read_spec(model_directory(path, str(tmp_path))[0])
    assert found.model_type == "mistral" and set(found.windows) == {None}
    both = (spec.ropes[0](jnp.array([63]), None)[0] for spec in (found, read_spec(HERE / name)))
    np.testing.assert_allclose(*both, atol=1e-5)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_alone_stretches_positions_evenly(key: str, tmp_path: Path) -> None:
    path = converted("llama-gqa", "llama", tmp_path / "model.gguf", **{f"llama.{key}": 4.0})
    stretched = read_spec(model_directory(path, str(tmp_path))[0]).ropes[0](jnp.array([4]), None)[0]
    plain = converted("llama-gqa", "llama", tmp_path / "plain.gguf")
    once = read_spec(model_directory(plain, str(tmp_path))[0]).ropes[0](jnp.array([1]), None)[0]
    np.testing.assert_allclose(stretched, once, atol=1e-6)


@pytest.mark.parametrize(
    "key", ["context_length", "attention.layer_norm_rms_epsilon", "expert_used_count"]
)
def test_keys_for_which_families_have_values_of_their_own_are_needed(
    key: str, tmp_path: Path
) -> None:
    model = open_model(converted("mixtral-experts", "llama", tmp_path / "model.gguf"))
    values = {name: value for name, value in model.metadata.values.items() if key not in name}
    own = Metadata(values)
    with pytest.raises(ConfigError, match=f"lacks llama.{key}"):
        architecture(own).config(replace(model, metadata=own))


def test_frequencies_without_a_base_are_those_of_ten_thousand(tmp_path: Path) -> None:
    model = open_model(converted("gpt-oss-fused", "gpt-oss", tmp_path / "model.gguf"))
    values = {name: value for name, value in model.metadata.values.items() if "base" not in name}
    own = Metadata(values)
    assert architecture(own).config(replace(model, metadata=own))["rope_theta"] == 10_000


def test_an_unknown_kind_of_scaled_positions_is_refused(tmp_path: Path) -> None:
    more = {"llama.rope.scaling.type": "spiral", "llama.rope.scaling.factor": 4.0}
    path = converted("llama-gqa", "llama", tmp_path / "model.gguf", **more)
    with pytest.raises(ConfigError, match=r"rope\.scaling\.type is 'spiral'"):
        model_directory(path, str(tmp_path))[0]


def test_gpt_oss_without_scaled_positions_has_none(tmp_path: Path) -> None:
    kind = {"gpt-oss.rope.scaling.type": "none"}
    path = converted("gpt-oss-fused", "gpt-oss", tmp_path / "model.gguf", **kind)
    directory = model_directory(path, str(tmp_path))[0]
    theta = read_spec(directory).config["rope_theta"]
    cos = read_spec(directory).ropes[0](jnp.array([63]), None)[0]
    dim = 2 * cos.shape[-1]
    wanted = np.cos(63 / theta ** (np.arange(0, dim, 2) / dim))
    np.testing.assert_allclose(np.asarray(cos).reshape(-1), wanted, atol=1e-4)


def test_queries_that_grow_without_yarn_are_refused(tmp_path: Path) -> None:
    more = {"mistral3.attention.temperature_scale": 0.1}
    path = converted("mistral-full-mqa", "mistral3", tmp_path / "model.gguf", **more)
    with pytest.raises(ConfigError, match=r"temperature_scale 0\.1 without YaRN"):
        model_directory(path, str(tmp_path))[0]


@pytest.mark.parametrize(
    ("layers", "largest", "width", "heads", "head", "expected"),
    [(42, 46, 3584, 16, 256, 256), (46, 46, 4608, 32, 128, 144), (62, 62, 5376, 32, 128, 168)],
    ids=["Gemma 2 9B", "Gemma 2 27B", "Gemma 3 27B"],
)
def test_scores_of_gemmas_are_scaled_as_published(
    layers: int, largest: int, width: int, heads: int, head: int, expected: int
) -> None:
    own = {"block_count": layers, "embedding_length": width, "attention.head_count": heads}
    keys = {f"gemma.{key}": value for key, value in own.items()}
    metadata = Metadata(
        {"general.architecture": "gemma", "gemma.attention.key_length": head, **keys}
    )
    assert score_width(metadata, largest) == expected


def quantised_matrices(number: int) -> Callable[[str, np.ndarray], Stored]:
    """Matrices of rows that blocks divide in this type, all else in float32."""

    def stored(name: str, tensor: np.ndarray) -> Stored:
        fits = tensor.ndim > 1 and tensor.shape[-1] % 32 == 0
        return quantised(tensor, number) if fits else plain(tensor)

    return stored


def parameters(spec: ModelSpec, directory: Path) -> list[np.ndarray]:
    """The model's parameters."""
    weights.check(directory, weights.outline(spec, make_mesh(1), "float32"))
    _, placed = weights.load(directory, weights.outline(spec, make_mesh(1), "float32"))
    return [np.asarray(each) for each in jax.tree.leaves(placed)]


@pytest.mark.parametrize("number", [Q8_0, Q4_0])
def test_a_quantised_file_is_placed_as_the_numbers_that_its_blocks_stand_for(
    number: int, tmp_path: Path
) -> None:
    path = converted("llama-gqa", "llama", tmp_path / "model.gguf", quantised_matrices(number))
    directory = model_directory(path, str(tmp_path))[0]
    spec = read_spec(directory)
    assert spec.scheme is not None
    assert ("Q8_0" if number == Q8_0 else "Q4_0") in spec.scheme.title
    found = checkpoint_tensors(open_model(path))
    numbers = {name: np.asarray(each) for name, each in found.items()}
    save_file(numbers, tmp_path / "model.safetensors")
    shutil.copy(HERE / "llama-gqa" / "config.json", tmp_path)
    expected = parameters(read_spec(tmp_path), tmp_path)
    for mine, theirs in zip(parameters(spec, directory), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    golden = load_file(HERE / "llama-gqa" / "model.safetensors")
    error = {name: np.abs(numbers[name] - golden[name]).max() for name in golden}
    assert 0 < max(error.values()) < (0.01 if number == Q8_0 else 0.1)


def leaves(spec: ModelSpec, directory: Path) -> dict[str, np.ndarray]:
    """The model's parameters by their paths."""
    _, state = weights.load(directory, weights.outline(spec, make_mesh(1), "float32"))
    found = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path).removesuffix(".value"): np.asarray(each) for path, each in found
    }


def stored_as(number: int) -> Callable[[str, np.ndarray], Stored]:
    """Matrices in this type; those of Q4_K are random."""
    if number != Q4_K:
        return quantised_matrices(number)
    return lambda name, tensor: (
        random_blocks(number, tensor.shape) if tensor.ndim > 1 else plain(tensor)
    )


def spread(values: np.ndarray, columns: int) -> np.ndarray:
    return np.repeat(values, columns // values.shape[-1], axis=-1)


def unpacked(held: dict[str, np.ndarray], path: str, columns: int) -> np.ndarray:
    """A weight of few bits as the numbers that it stands for, [rows, columns]."""
    values = held[f"{path}['values']"]
    if values.dtype == np.int8:
        return (values * spread(held[f"{path}['scale']"], columns)).reshape(-1, columns)
    scales, offsets = held[f"{path}['scales']"], held.get(f"{path}['others']")
    rows = 64 * values.shape[0]
    return np.asarray(
        dequantised(Int4(values, scales, None, offsets, rows, 32), columns, "float32")
    )


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        pytest.param(Q8_0, WeightFormat("int8", 32, scales="float16"), marks=pytest.mark.slow),
        pytest.param(Q4_0, WeightFormat("int4", 32), marks=pytest.mark.slow),
        (Q4_K, WeightFormat("int4", 32, form="offsets")),
    ],
    ids=["Q8_0", "Q4_0", "Q4_K"],
)
def test_blocks_of_integers_stay_integers(number: int, kind: WeightFormat, tmp_path: Path) -> None:
    demo = str(locate("demo"))
    path = converted(demo, "qwen3", tmp_path / "model.gguf", stored_as(number))
    directory = model_directory(path, str(tmp_path))[0]
    plain_spec = read_spec(directory)
    formats = weights.weight_formats(directory, plain_spec, None)
    assert set(formats.values()) == {kind}
    spec = replace(plain_spec, formats=formats)
    weights.check(directory, weights.outline(spec, make_mesh(1), "float32"))
    held, plain = leaves(spec, directory), leaves(plain_spec, directory)
    paths = [name.removesuffix("['values']") for name in held if name.endswith("['values']")]
    # A table that is the head stays in few bits where its product is summed in float32
    assert ("['embed']['weight']" in paths) == (number == Q8_0)
    assert len(paths) == 4 * len(spec.layers) + (number == Q8_0)
    for name in paths:
        columns = 512 if "['out']" in name or "['down']" in name else 256
        found, wanted = unpacked(held, name, columns), plain[name].reshape(-1, columns)
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
