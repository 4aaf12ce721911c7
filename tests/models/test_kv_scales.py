"""What a configuration may say of 8-bit keys and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm import models
from jaxllm.config import ConfigError
from tests.weights.scaled import checkpoint

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
    (MODELOPT, {"kv_cache_quant_algo": "NVFP4"}),
    (MODELOPT, {"kv_cache_quant_algo": []}),
    (COMPRESSED, {"kv_cache_scheme": None, "kv_cache_quant_algo": "INT8"}),
    (MODELOPT, {"kv_cache_scheme": SCHEME, "quant_algo": "MIXED_PRECISION"}),
    (MODELOPT, {"kv_cache_scheme": SCHEME | {"num_bits": 4}}),
    (OWN, {"quant_method": "gptq"}),
    (MODELOPT, {"quant_algo": "INT4_AWQ"}),
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


@pytest.mark.parametrize(
    "asked",
    [
        MODELOPT | {"quant_algo": "FP8"},
        OWN | {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        COMPRESSED
        | {
            "format": "float-quantized",
            "config_groups": {"group_0": WIDE | {"weights": SCHEME}},
        },
    ],
    ids=["modelopt", "its own file", "compressed-tensors"],
)
def test_a_configuration_may_quantise_weights_beside_them(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    spec = models.read_spec(checkpoint(tmp_path, {}, quantization_config=asked))
    assert spec.kv_cache_dtype == "fp8_e4m3" and spec.scheme is not None


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
