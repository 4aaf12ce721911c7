"""Matrices of few bits in groups of columns against what their libraries make of them."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.quantisation import PackedTensor, read_scheme
from jaxllm.quantisation.scheme import Stored
from tests.quantisation.grouped_checkpoints import (
    MADE,
    Made,
    awq,
    awq_gemv,
    gptq,
    pack_quantized,
)
from tests.quantisation.test_schemes import cuts

GEMV = np.load(Path(__file__).parents[1] / "goldens/awq_gemv.npz")
TYPES = {"int32": "I32", "int64": "I64", "float16": "F16"}


class Header(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def tensors(made: Made) -> list[PackedTensor]:
    headers = {name: Header(TYPES[str(a.dtype)], a.shape) for name, a in made.stored.items()}
    stored = Stored(headers, made.stored.__getitem__)
    return list(read_scheme(made.settings["quant_method"], made.settings).tensors(stored))


@pytest.mark.parametrize("name", MADE)
def test_a_matrix_is_what_its_library_makes_of_it(name: str) -> None:
    made = MADE[name]
    (found,) = tensors(made)
    assert (found.name, found.shape) == ("X.weight", made.weight.shape)
    assert sorted(part.name for part in found.parts) == sorted(made.stored)
    for part in found.parts:
        array = made.stored[part.name]
        assert array.shape == part.shape and TYPES[str(array.dtype)] in part.dtypes
    arrays = [made.stored[part.name] for part in found.parts]
    for bounds in cuts(found.shape):
        own = found.unpack(arrays, bounds)
        assert own.dtype == np.float32
        np.testing.assert_array_equal(own, made.weight[tuple(slice(*each) for each in bounds)])


@pytest.mark.parametrize("name", sorted({key.partition("/")[0] for key in GEMV}))
def test_the_gemv_version_is_what_autoawq_packs(name: str) -> None:
    stored = {f"X.{leaf}": GEMV[f"{name}/{leaf}"] for leaf in ("qweight", "qzeros", "scales")}
    settings = {"quant_method": "awq", "w_bit": 4, "q_group_size": int(GEMV[f"{name}/group"])}
    plain = GEMV[f"{name}/plain"]
    (found,) = tensors(Made(settings | {"version": "GEMV"}, stored, plain))
    assert [(part.name, part.shape) for part in found.parts] == [
        (f"X.{leaf}", stored[f"X.{leaf}"].shape) for leaf in ("qweight", "scales", "qzeros")
    ]
    arrays = [stored[part.name] for part in found.parts]
    for bounds in cuts(found.shape):
        own = plain[tuple(slice(*each) for each in bounds)]
        np.testing.assert_array_equal(found.unpack(arrays, bounds), own)


def test_scales_of_an_activation_divide_the_columns_that_read_it() -> None:
    made, divisors = awq((8, 24), 8), np.linspace(0.5, 2, 24).astype(np.float16)
    names = {"X": "h.0.mlp.c_proj", "Y": "h.0.attn.c_proj", "Z": "h.0.mlp.c_fc"}
    stored = {
        f"{module}{name[1:]}": array
        for module in names.values()
        for name, array in made.stored.items()
    } | {"h.0.mlp.act.scales": divisors}
    found = {tensor.name: tensor for tensor in tensors(made._replace(stored=stored))}
    for letter, module in names.items():
        tensor = found[f"{module}.weight"]
        arrays, expected = [stored[part.name] for part in tensor.parts], made.weight
        if letter == "X":
            expected = expected / divisors.astype(np.float32)
            tensor.check(arrays)
        assert (tensor.format is None) == (letter == "X")
        for bounds in cuts(tensor.shape):
            own = tensor.unpack(arrays, bounds)
            np.testing.assert_array_equal(own, expected[tuple(slice(*each) for each in bounds)])
    wrong = found["h.0.mlp.c_proj.weight"]
    stored["h.0.mlp.act.scales"][3] = 0
    with pytest.raises(ConfigError, match=r"mlp.act.scales has the scale 0.0; such scales are"):
        wrong.check([stored[part.name] for part in wrong.parts])


def test_a_zero_point_of_gptq_wraps_around_its_bits() -> None:
    made = gptq((8, 8))
    (found,) = tensors(made)
    stored = made.stored | {"X.qzeros": np.full((1, 1), -1, np.int32)}  # 15 each
    made.stored["X.qweight"][:] = 0x11111111
    own = found.unpack([stored[part.name] for part in found.parts], ((0, 8), (0, 8)))
    np.testing.assert_array_equal(own, np.repeat(stored["X.scales"].T.astype(np.float32), 8, 1))


def test_a_last_group_that_is_cut_off_keeps_its_size_where_modules_differ() -> None:
    made = gptq((8, 24), 16)
    made.settings["dynamic"] = {"-:.*down_proj": {}}
    (found,) = tensors(made)
    arrays = [made.stored[part.name] for part in found.parts[:3]]
    plain = replace(found, parts=found.parts[:3]).unpack(arrays, ((0, 8), (0, 24)))
    np.testing.assert_array_equal(plain, made.weight)


@pytest.mark.parametrize(("method", "key"), [("gptq", "dynamic"), ("auto-round", "extra_config")])
def test_modules_with_other_bits_or_groups_are_known_by_their_shapes(method: str, key: str) -> None:
    four, eight = gptq((16, 32), 16), gptq((16, 32), 8, 8)
    stored = four.stored | {name.replace("X", "Y"): value for name, value in eight.stored.items()}
    settings = four.settings | {"quant_method": method, key: {"Y": {"bits": 8, "group_size": 8}}}
    for found in tensors(Made(settings, stored, four.weight)):
        arrays = [stored[part.name] for part in found.parts]
        assert [a.shape for a in arrays] == [part.shape for part in found.parts]
        wanted = (four if found.name == "X.weight" else eight).weight
        np.testing.assert_array_equal(found.unpack(arrays, ((0, 16), (0, 32))), wanted)


def test_groups_of_modules_with_different_bits_are_told_apart() -> None:
    four, eight = pack_quantized((8, 32), 16), pack_quantized((8, 32), None, 8)
    settings = copy.deepcopy(four.settings)
    settings["config_groups"]["group_1"] = eight.settings["config_groups"]["group_0"]
    stored = four.stored | {name.replace("X", "Y"): value for name, value in eight.stored.items()}
    for found in tensors(Made(settings, stored, four.weight)):
        arrays = [stored[part.name] for part in found.parts]
        wanted = (four if found.name == "X.weight" else eight).weight
        np.testing.assert_array_equal(found.unpack(arrays, ((0, 8), (0, 32))), wanted)


def test_rows_of_4_and_of_8_bits_are_told_apart_by_their_shapes() -> None:
    four, eight = pack_quantized((8, 32)), pack_quantized((8, 20), None, 8)
    settings = copy.deepcopy(four.settings)
    settings["config_groups"]["group_1"] = eight.settings["config_groups"]["group_0"]
    stored = four.stored | {name.replace("X", "Y"): value for name, value in eight.stored.items()}
    found = {own.name: own for own in tensors(Made(settings, stored, four.weight))}
    assert found["X.weight"].shape == (8, 32) and found["Y.weight"].shape == (8, 20)


def promising(**settings: Any) -> Made:
    """Groups in no order with zero points, as their settings say."""
    made = pack_quantized((8, 32), 16, symmetric=False, shuffled=True)
    made.settings["config_groups"]["group_0"]["weights"] |= {"actorder": "group", **settings}
    return made


def without(made: Made, *leaves: str) -> list[str]:
    """Leaves of the tensor's parts, where the checkpoint lacks some."""
    stored = {n: array for n, array in made.stored.items() if n.rpartition(".")[2] not in leaves}
    (found,) = tensors(made._replace(stored=stored))
    return [part.name.rpartition(".")[2] for part in found.parts]


@pytest.mark.parametrize("leaf", ["weight_zero_point", "weight_g_idx"])
def test_what_settings_promise_is_a_part_that_may_not_be_missing(leaf: str) -> None:
    assert leaf in without(promising(), leaf)
    assert leaf not in without(promising(symmetric=True, actorder="static"), leaf)


def test_settings_that_no_size_tells_apart_promise_what_all_of_them_do() -> None:
    made, other = promising(), promising(symmetric=True)
    made.settings["config_groups"]["group_1"] = other.settings["config_groups"]["group_0"]
    left = without(made, "weight_zero_point", "weight_g_idx")
    assert "weight_zero_point" not in left and "weight_g_idx" in left


def test_an_order_that_was_never_written_is_none() -> None:
    made = pack_quantized((8, 32), 16)
    made.stored["X.weight_g_idx"] = np.full(32, -1, np.int32)
    (found,) = tensors(made)
    arrays = [made.stored[part.name] for part in found.parts]
    np.testing.assert_array_equal(found.unpack(arrays, ((0, 8), (0, 32))), made.weight)


@pytest.mark.parametrize(
    ("made", "leaf", "value", "message"),
    [
        (awq((8, 8)), "scales", np.full((1, 8), np.nan, np.float16), "X.scales has the scale nan"),
        (
            awq_gemv((8, 8)),
            "scales",
            np.pad(np.full((8, 1), np.inf, np.float16), ((0, 0), (0, 7))),
            "X.scales has the scale inf",
        ),
        (gptq((8, 8)), "scales", np.full((1, 8), np.inf, np.float16), "scale inf; .* finite"),
        (gptq((8, 8)), "g_idx", np.full(8, 1, np.int32), "X.g_idx has the group 1; there are 1"),
        (gptq((8, 8)), "g_idx", np.full(8, -1, np.int32), "X.g_idx has the group -1"),
        (
            pack_quantized((8, 8)),
            "weight_shape",
            np.array([8, 7]),
            r"X.weight_shape is \[8, 7\], the numbers have the shape \[8, 8\]",
        ),
    ],
    ids=["not a number", "infinite in gemv", "infinite", "no such group", "negative", "shape"],
)
def test_values_that_cannot_be_are_named(
    made: Made, leaf: str, value: np.ndarray, message: str
) -> None:
    (found,) = tensors(made)
    stored = made.stored | {f"X.{leaf}": value}
    with pytest.raises(ConfigError, match=message):
        found.unpack([stored[part.name] for part in found.parts], ((0, 8), (0, 8)))


def test_a_shape_without_columns_is_named() -> None:
    made = pack_quantized((8, 8))
    made.stored["X.weight_shape"][:] = 0
    (found,) = tensors(made)
    with pytest.raises(ConfigError, match=r"X.weight_shape is \[0, 0\], the numbers have"):
        found.unpack([made.stored[part.name] for part in found.parts], ((0, 8), (0, 8)))


def changed(made: Made, **settings: Any) -> Made:
    return made._replace(settings=made.settings | settings)


def in_group(**settings: Any) -> Made:
    made = copy.deepcopy(pack_quantized((8, 8)))
    group = made.settings["config_groups"]["group_0"]
    group |= {
        key: value for key, value in settings.items() if key in ("format", "input_activations")
    }
    group["weights"] |= {k: v for k, v in settings.items() if k not in group}
    return made


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (changed(awq((8, 8)), bits=3), "bits is 3; 4 are read"),
        (changed(awq((8, 8)), version="exllama"), "is 'exllama'; gemm and gemv are read"),
        (changed(awq((8, 8)), group_size=0), "group_size is 0; a positive integer .* or -1"),
        (changed(awq((8, 8)), group_size="128"), "group_size is '128'"),
        (changed(gptq((8, 8)), bits=True), "bits is True; 2 or 3 or 4 or 8 are read: take"),
        (changed(gptq((8, 8)), checkpoint_format="marlin"), "is 'marlin'; gptq and gptq_v2 are"),
        (changed(MADE["auto-round"], packing_format="itrex"), "packing_format is 'itrex'; auto_"),
        (changed(MADE["auto-round"], act_bits=8), "act_bits is 8; integers with inputs as they"),
        (changed(MADE["auto-round"], data_type="mx_fp"), "data_type is 'mx_fp'; integers"),
        (changed(pack_quantized((8, 8)), config_groups=None), "config_groups must be an object"),
        (
            changed(pack_quantized((8, 8)), format="marlin-24"),
            "the format 'marlin-24'; .* pack-quantized",
        ),
        (
            in_group(num_bits=3),
            "num_bits of config_groups.group_0 is 3; integers of 4 or 8 are read",
        ),
        (in_group(type="float"), "num_bits of config_groups.group_0 is 4; integers"),
        (
            in_group(strategy="block"),
            "strategy and group_size of config_groups.group_0 are 'block'",
        ),
        (in_group(strategy="group", group_size=0), "are 'group' and 0; group with a positive"),
        (
            in_group(input_activations={"num_bits": 8}),
            "config_groups.group_0.input_activations is .*; of 4-bit weights alone",
        ),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_settings_that_are_not_read_are_named(made: Made, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_scheme(made.settings["quant_method"], made.settings)
    assert len(str(error.value)) < 200 and not re.search(r"\n", str(error.value))


@pytest.mark.parametrize(
    ("made", "key"), [(awq((8, 8)), "version"), (gptq((8, 8)), "checkpoint_format")]
)
def test_null_is_the_usual_format(made: Made, key: str) -> None:
    method, usual = made.settings["quant_method"], {**made.settings, key: None}
    assert read_scheme(method, usual) == read_scheme(method, made.settings)


@pytest.mark.parametrize(
    ("settings", "like"),
    [
        ({"quant_method": "intel/auto-round", "packing_format": "auto_round:gptq"}, "as gptq"),
        ({"quant_method": "auto_round", "packing_format": "auto"}, "as gptq"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:awq"}, "as awq"),
    ],
)
def test_auto_rounds_older_names_are_read(settings: dict[str, Any], like: str) -> None:
    made = MADE[f"auto-round {like}"]
    own = made.settings | settings
    found, wanted = (read_scheme(s["quant_method"], s) for s in (own, made.settings))
    assert found == wanted and found.method == "auto-round"


def test_titles_say_the_bits_and_the_groups() -> None:
    titles = {
        name: read_scheme(m.settings["quant_method"], m.settings).title for name, m in MADE.items()
    }
    assert titles["awq"] == "awq: 4 bits with scales of 8 columns"
    assert titles["auto-round as awq"] == "auto-round: 4 bits with scales of 8 columns"
    assert titles["gptq of 2 bits, one group"] == "gptq: 2 bits with scales of rows"
    assert titles["pack-quantized"] == "compressed-tensors: 4 bits with scales of 8 columns"
