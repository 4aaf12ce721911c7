"""Reading single values and files, and what a fault of them says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxllm import models
from jaxllm.config import ConfigError
from jaxllm.locate import MAX_JSON_BYTES
from jaxllm.models.config.build import kv_scale_names, kv_scales_rule
from jaxllm.models.config.read import eos_token_ids, flag, number, positive
from tests.goldens.golden import load_golden

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@hypothesis.given(JSON)
def test_any_json_value_is_read_or_refused_in_one_line(value: Any) -> None:
    for read in (positive, flag, number, lambda hf, key: eos_token_ids({"eos_token_id": hf[key]})):
        said = "fine"
        try:
            read({"key": value}, "key")
        except ConfigError as error:
            said = str(error)
        assert len(said.splitlines()) == 1 and len(said) < 250


@hypothesis.given(st.integers(1, 2**31 - 1))
def test_sizes_and_numbers_in_range_come_back(value: int) -> None:
    assert positive({"a": value}, "a") == value
    assert number({"a": value}, "a") == value
    assert number({}, "a", value) == number({"a": None}, "a", value) == value


@hypothesis.given(st.dictionaries(st.sampled_from(["model_type", "head_dim", "x"]), JSON))
def test_a_configuration_of_anything_is_refused_and_no_traceback(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        models.make_spec({"model_type": "qwen3"} | config)


@pytest.mark.parametrize(
    ("value", "ids"), [(None, set()), (3, {3}), ([], set()), ([3, 5, 3], {3, 5})]
)
def test_end_of_sequence_ids_have_three_forms(value: object, ids: set[int]) -> None:
    assert eos_token_ids({"eos_token_id": value}) == ids


@pytest.mark.parametrize("value", [True, "3", 3.0, [3, None], [[3]], {"id": 3}])
def test_other_forms_of_ids_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="must be an integer, a list of integers or null"):
        eos_token_ids({"eos_token_id": value})


def test_a_file_of_no_sensible_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ConfigError, match="larger than 16 MiB; that is not a configuration"):
        models.read_config(tmp_path)


@pytest.mark.parametrize("text", [b"\xff", b"[" * 100_000, b'{"a": NaN', b""])
def test_what_is_no_json_says_so(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        models.read_config(tmp_path)


def test_a_fifo_as_config_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        models.read_config(tmp_path)


@pytest.mark.parametrize("nothing", [None, {}])
def test_an_empty_quantisation_gives_way_to_the_file_of_modelopt(
    tmp_path: Path, nothing: object
) -> None:
    config = {"model_type": "llama", "quantization_config": nothing}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert models.read_config(tmp_path) == config
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A8"}}')
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json \(modelopt\) is not supported"):
        models.read_config(tmp_path)


@pytest.mark.parametrize(
    ("file", "settings", "title"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 64, "sym": True}, "gptq: 4 bits"),
        ("quantize_config.json", {"quant_method": None, "bits": 4, "group_size": 64}, "gptq: 4"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}, "awq: 4 bits"),
        ("quantize_config.json", {"quant_method": "awq", "bits": 4, "group_size": 64}, "awq: 4"),
    ],
)
def test_the_files_of_older_quantisers_say_how_weights_are_packed(
    tmp_path: Path, file: str, settings: dict[str, Any], title: str
) -> None:
    golden = json.loads((load_golden("llama-gqa").directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(golden))
    (tmp_path / file).write_text(json.dumps(settings))
    scheme = models.read_spec(tmp_path).scheme
    assert scheme is not None and scheme.title.startswith(title)
    (tmp_path / file).write_text(json.dumps(settings | {"bits": 5}))
    with pytest.raises(ConfigError, match=rf"{file} \((gptq|awq)\) is not supported; bits is 5"):
        models.read_config(tmp_path)


def test_scales_have_the_names_of_their_layer() -> None:
    spec = models.read_spec(str(load_golden("llama-gqa").directory))
    for layer in (0, 31):
        names = kv_scale_names(spec, layer)
        assert len(set(names)) == len(names)
        assert all(n.startswith(f"model.layers.{layer}.self_attn.") for pair in names for n in pair)
    rule = kv_scales_rule(3, (("k", (2, 1)), ("v", (1,))), heads=8)
    assert [(p.view, p.start, p.repeat) for p in rule.pieces] == [((2, 1), 0, 4), ((1, 1), 1, 8)]
