"""Checkpoints of compressed-tensors and of modelopt: values as the former restores them, and what a
configuration may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.nn.weight.int4 import row_parts
from jaxllm.quantisation import PackedTensor, WeightFormat, read_scheme
from jaxllm.quantisation.scheme import Stored

GOLDEN = np.load(Path(__file__).parents[1] / "goldens/compressed.npz")
EXPONENTS = np.load(Path(__file__).parents[1] / "goldens/mxfp8.npz")
NAMES = sorted({name.partition("/")[0] for name in GOLDEN})
FOUR = [name for name in NAMES if name.startswith("4 bits")]
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel"}
TYPES = {"float": ("F8_E4M3", ml_dtypes.float8_e4m3fn), "int": ("I8", np.int8)}


class Header(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def config(weights: Any = FLOATS, inputs: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"format": "float-quantized", "config_groups": {"group_0": group | more}}


def tensors(settings: dict[str, Any], stored: dict[str, Header]) -> dict[str, PackedTensor]:
    found = read_scheme("compressed-tensors", settings).tensors(stored)
    return {tensor.name: tensor for tensor in found}


def unpacked(tensor: PackedTensor, arrays: dict[str, np.ndarray]) -> np.ndarray:
    whole = tuple((0, size) for size in tensor.shape)
    return tensor.unpack([arrays[part.name] for part in tensor.parts], whole)


def stored(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Header]]:
    """Settings of a golden's weights, and its tensors with their headers."""
    weights = json.loads(str(GOLDEN[f"{name}/settings"]))
    stored, dtype = TYPES[weights["type"]]
    arrays = {
        f"a.{leaf}": GOLDEN[f"{name}/{leaf}"].view(dtype if leaf != "weight_scale" else np.float32)
        for leaf in ("weight", "weight_scale", "weight_zero_point")
        if f"{name}/{leaf}" in GOLDEN
    }
    headers = {
        key: Header("F32" if key.endswith("scale") else stored, array.shape)
        for key, array in arrays.items()
    }
    return weights, arrays, headers


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FOUR])
def test_matrices_are_what_their_library_makes_of_them(name: str) -> None:
    weights, arrays, headers = stored(name)
    (found,) = tensors(config(weights), headers).values()
    plain = GOLDEN[f"{name}/plain"]
    np.testing.assert_array_equal(unpacked(found, arrays), plain)
    assert found.format is not None
    assert (found.format.form == "offsets") == ("zero" in name)
    values, *others = (unpacked(leaf, arrays).astype(np.float32) for leaf in found.leaves())
    group = found.format.group or 80
    scale, *offsets = (np.repeat(each, group, axis=1)[:, :80] for each in others)
    np.testing.assert_allclose(values * scale + sum(offsets), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FOUR)
def test_integers_of_4_bits_may_take_a_byte_each(name: str) -> None:
    weights, arrays, headers = stored(name)
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    (found,) = tensors(config(weights, inputs, format="int-quantized"), headers).values()
    plain = GOLDEN[f"{name}/plain"]
    np.testing.assert_array_equal(unpacked(found, arrays), plain)
    form = "zeros" if "zero" in name else "symmetric"
    group = weights.get("group_size")
    expected = WeightFormat("int4", group, "token", form, input_numbers="int8")
    assert found.format == expected
    assert expected.title.endswith("inputs in int8 with scales of tokens")
    (rows,) = found.leaves()
    made = row_parts(expected, jnp.asarray(unpacked(rows, arrays)), plain.shape[1])
    numbers, scales, zeros = (np.asarray(part, np.float32) for part in made)
    wide = [np.repeat(each, group or 80, axis=1) for each in (scales, zeros)]
    middle = wide[1] if form == "zeros" else 8
    np.testing.assert_array_equal((numbers - middle) * wide[0], plain)
    arrays["a.weight"][2, 3] = 8
    with pytest.raises(ConfigError, match=r"a\.weight has the number 8; those of 4 bits are"):
        unpacked(found, arrays)


@pytest.mark.parametrize("name", ["integers with zero points", "4 bits with zero points"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_zero_points_that_settings_promise_may_not_be_missing(name: str, symmetric: bool) -> None:
    weights, _, headers = stored(name)
    del headers["a.weight_zero_point"]
    settings = config(weights | {"symmetric": symmetric}, format="int-quantized")
    (found,) = tensors(settings, headers).values()
    parts = [part.name for part in found.parts]
    assert ("a.weight_zero_point" in parts) == (not symmetric)


@pytest.mark.parametrize("name", ["integers with zero points", "4 bits with zero points"])
@pytest.mark.parametrize("actorder", ["group", True, "dynamic", "weight", "static", None])
def test_weights_in_bytes_have_groups_in_order(name: str, actorder: Any) -> None:
    weights, _, headers = stored(name)
    settings = config(weights | {"actorder": actorder}, format="int-quantized")
    if actorder in ("weight", "static", None):
        assert tensors(settings, headers)
    else:
        with pytest.raises(ConfigError, match=r"actorder of .* static or weight"):
            tensors(settings, headers)


@pytest.mark.parametrize("format", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize(
    "inputs",
    [
        {"num_bits": 4},
        {"dynamic": False},
        {"symmetric": False},
        {"type": "nf"},
        {"type": ["int"]},
        {"strategy": "group", "group_size": 32},
    ],
)
def test_inputs_of_4_bit_weights_that_are_not_read_are_named(
    inputs: dict[str, Any], format: str
) -> None:
    four = {"num_bits": 4, "type": "int", "strategy": "channel"}
    settings = config(four, TOKEN | inputs, format=format)
    with pytest.raises(ConfigError, match="of 4-bit weights alone, inputs of 8 bits, symmet"):
        read_scheme("compressed-tensors", settings)


def test_matrices_that_sizes_alone_tell_apart_have_inputs_alike() -> None:
    four = {"num_bits": 4, "type": "int", "strategy": "channel"}
    groups = config(four, TOKEN, format="pack-quantized")["config_groups"]
    groups["group_1"] = {**groups["group_0"], "input_activations": None}
    with pytest.raises(ConfigError, match="group_0 and others of its format round inputs differe"):
        read_scheme("compressed-tensors", {"config_groups": groups})


def test_a_group_that_names_a_module_goes_before_one_of_all_linear_maps() -> None:
    every, by_name, by_pattern = (
        {"targets": targets, "weights": FLOATS, "input_activations": inputs}
        for targets, inputs in (
            (["Linear"], None),
            (["layers.1.down_proj"], TOKEN),
            (["re:.*up_proj$"], TOKEN | {"strategy": "group"}),
        )
    )
    settings = {
        "format": "float-quantized",
        "config_groups": {"a": every, "b": by_name, "c": by_pattern},
    }
    modules = ("layers.0.down_proj", "layers.1.down_proj", "layers.0.up_proj")
    stored = {f"model.{module}.weight": Header("F8_E4M3", (4, 6)) for module in modules}
    stored["lm_head.weight"] = Header("BF16", (4, 6))
    found = tensors(settings, stored)
    assert [own.format.inputs for own in found.values() if own.format] == [
        "plain",
        "token",
        "token",  # of all columns
    ]


def test_integers_keep_the_scale_of_their_inputs() -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "tensor"}
    settings = config(weights, weights | {"dynamic": False}, format="int-quantized")
    (found,) = tensors(settings, {"a.weight": Header("I8", (4, 6))}).values()
    assert found.format == WeightFormat("int8", None, "given")
    assert [part.name for part in found.parts] == ["a.weight", "a.weight_scale", "a.input_scale"]


def test_integers_have_zero_points_for_their_tokens() -> None:
    weights, shifted = FLOATS | {"type": "int"}, TOKEN | {"type": "int", "symmetric": False}
    (found,) = tensors(config(weights, shifted), {"a.weight": Header("I8", (4, 6))}).values()
    assert found.format == WeightFormat("int8", None, "shifted")
    assert found.format.title.endswith("inputs with scales and zero points of tokens")
    for wrong in ({"strategy": "group"}, {"dynamic": False}, {"type": "float"}, {"symmetric": 0}):
        with pytest.raises(ConfigError, match="; integers with zero points, dynamic for each tok"):
            tensors(config(weights, shifted | wrong), {})


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"num_bits": 8, "type": "float"}, {"strategy": "tensor"}),
        ({"type": "FLOAT", "strategy": "Channel"}, FLOATS),
        ({"type": "float", "group_size": 32}, {"strategy": "group"}),
        ({"type": "float", "group_size": -1}, {"strategy": "channel"}),
        (
            {"type": "float", "strategy": "block", "block_structure": "16x32"},
            {"block_structure": [16, 32]},
        ),
    ],
)
def test_what_its_library_adds_to_settings_is_added(
    given: dict[str, Any], same: dict[str, Any]
) -> None:
    own, other = (
        read_scheme("compressed-tensors", config(weights))
        for weights in (given, {"num_bits": 8} | given | {"type": "float"} | same)
    )
    assert own == other


FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "config_groups must be an object with a group"),
        (config(None), r"config_groups.group_0 must be an object with weights"),
        (config(format="dense-ish"), "has the format 'dense-ish'; those that are read are float"),
        (config(FLOATS | {"num_bits": 4}), "weights of 4 bits, type 'float'; 8 bits"),
        (config(FLOATS | {"type": "nf"}), "type 'nf'; 8 bits, float or int"),
        (config(FLOATS | {"strategy": "group"}), "the strategy 'group' with group_size None"),
        (config(FLOATS | {"strategy": "group", "group_size": 0}), "with group_size 0"),
        (config(FLOATS | {"strategy": "block", "block_structure": [128]}), r"structure \[128\]"),
        (config(FLOATS | {"strategy": ["x"]}), "strategy"),
        (
            config(FLOATS | {"num_bits": 4, "group_size": [16]}, format="nvfp4-pack-quantized"),
            r"group_size \[16\]; floats of 4 bits in groups of 16 or 32 are read",
        ),
        (config(FLOATS, TOKEN | {"num_bits": 4}), "input_activations is .* 8 bits of the weights'"),
        (config(FLOATS, TOKEN | {"type": "int"}), "input_activations is"),
        (config(FLOATS, TOKEN | {"symmetric": False}), "input_activations is"),
        (config(FLOATS, TOKEN | {"dynamic": False}), "input_activations is"),
        (config(FLOATS, TOKEN | {"dynamic": "local"}), "input_activations is"),
        (config(FLOATS, "all"), "input_activations is 'all'"),
        (config(targets="Linear"), "targets must be a list of names"),
        (config(targets=["re:("]), "targets has no legal pattern"),
        (config(FOUR, format="pack-quantized", targets=["re:["]), "targets has no legal pattern"),
        (config(FOUR, format="pack-quantized", targets=None), "targets must be a list of names"),
        (config() | {"ignore": "lm_head"}, "ignore must be a list of names"),
        (config() | {"ignore": ["lm_head", "re:*"]}, "ignore has no legal pattern"),
        (config(output_activations=TOKEN), "has output_activations, which are not supported"),
        (config() | {"transform_config": {"a": 1}}, "transform_config is not supported"),
    ],
)
def test_what_is_not_read_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_scheme("compressed-tensors", settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("algorithm", "shape", "expected"),
    [
        ("FP8", (), WeightFormat("fp8", None, "given")),
        ("FP8_PER_CHANNEL_PER_TOKEN", (130,), WeightFormat("fp8", None, "token")),
        ("FP8_PB_WO", (2, 1, 3, 1), WeightFormat("fp8", 128, "plain")),
    ],
)
def test_algorithms_of_modelopt(
    algorithm: str, shape: tuple[int, ...], expected: WeightFormat
) -> None:
    stored = {
        "a.weight": Header("F8_E4M3", (130, 260)),
        "a.weight_scale": Header("F32", shape),
        "a.input_scale": Header("F32", ()),
    }
    (found,) = read_scheme("modelopt", {"quant_algo": algorithm}).tensors(stored)
    assert found.format == expected
    rng = np.random.default_rng(0)
    values = rng.normal(size=(130, 260)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(1, 2, shape).astype(np.float32)
    arrays = {"a.weight": values, "a.weight_scale": scale, "a.input_scale": np.float32(2)}
    wide = np.broadcast_to(scale.reshape(-1, 1) if len(shape) < 2 else 0, (130, 260))
    if len(shape) == 4:
        wide = np.repeat(np.repeat(scale[:, 0, :, 0], 128, 0), 128, 1)[:130, :260]
    plain = values.astype(np.float32) * wide
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    np.testing.assert_array_equal(unpacked(found, arrays), plain)


@pytest.mark.parametrize("name", sorted({key.partition("/")[0] for key in EXPONENTS}))
def test_floats_with_exponents_are_what_their_libraries_make_of_them(name: str) -> None:
    arrays = {f"a.{leaf}": EXPONENTS[f"{name}/{leaf}"] for leaf in ("weight", "weight_scale")}
    arrays["a.weight"] = arrays["a.weight"].view(ml_dtypes.float8_e4m3fn)
    method, settings = "modelopt", {"quant_algo": "MXFP8"}
    if name == "compressed-tensors":
        method, group = name, json.loads(str(EXPONENTS[f"{name}/settings"]))
        settings = {"format": "mxfp8-quantized", "config_groups": {"group_0": group}}
    plain = EXPONENTS[f"{name}/plain"]
    headers = {
        "a.weight": Header("F8_E4M3", plain.shape),
        "a.weight_scale": Header("U8", arrays["a.weight_scale"].shape),
    }
    (found,) = read_scheme(method, settings).tensors(headers)
    assert found.format == WeightFormat("fp8", 32, "plain")
    assert [part.shape for part in found.parts] == [each.shape for each in arrays.values()]
    np.testing.assert_array_equal(unpacked(found, arrays), plain)
    values, scale = (unpacked(leaf, arrays).astype(np.float32) for leaf in found.leaves())
    wide = np.repeat(scale, 32, axis=1)[:, : plain.shape[1]]
    np.testing.assert_array_equal(values * wide, plain)
    arrays["a.weight_scale"] = np.full_like(arrays["a.weight_scale"], 255)
    for tensor in (found, found.leaves()[1]):
        with pytest.raises(ConfigError, match=r"a\.weight_scale has the scale nan; scales are "):
            tensor.check([arrays[part.name] for part in tensor.parts])


def test_an_algorithm_that_modelopt_alone_knows_is_named() -> None:
    with pytest.raises(ConfigError, match="quant_algo is 'W4A8_AWQ'; those that are read are FP8,"):
        read_scheme("modelopt", {"quantization": {"quant_algo": "W4A8_AWQ"}})


def test_modules_of_mixed_precision_have_algorithms_of_their_own() -> None:
    layers = {"a.q": {"quant_algo": "FP8"}, "a.mlp": {"quant_algo": "NVFP4", "group_size": 16}}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    stored = {
        "a.q.weight": Header("F8_E4M3", (8, 32)),
        "a.o.weight": Header("BF16", (8, 32)),
        "a.mlp.up.weight": Header("U8", (8, 16)),
    }
    scheme = read_scheme("modelopt", {"quantization": mixed})
    found = {tensor.name: tensor.format for tensor in scheme.tensors(stored)}
    assert found == {
        "a.q.weight": WeightFormat("fp8", None, "given"),
        "a.mlp.up.weight": WeightFormat("fp4", 16),
    }
    assert scheme.title == "modelopt MIXED_PRECISION (FP8, NVFP4)"
    stored["b.weight"] = Header("F8_E4M3", (8, 32))
    # As random weights of a checkpoint that leaves it plain are asked for
    assert {tensor.name for tensor in scheme.tensors(stored)} == set(found)
    stored = Stored(stored, lambda name: np.zeros(0))
    with pytest.raises(ConfigError, match=r"b\.weight has few bits, but quantized_layers does not"):
        list(scheme.tensors(stored))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (None, "quantized_layers is None; with MIXED_PRECISION it must be an object"),
        ({"a": {"quant_algo": "W4A8_AWQ"}}, "quant_algo of a is 'W4A8_AWQ'; those that are read"),
        ({"a": []}, r"quant_algo of a is \[\]; those that are read"),
    ],
)
def test_mixed_precision_that_is_not_read_is_named(layers: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_scheme("modelopt", {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
