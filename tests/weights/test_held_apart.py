"""Fused maps whose parts a checkpoint stores in unlike formats keep each part in its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxllm import models, weights
from jaxllm.quantisation import WeightFormat
from tests.goldens.cases import CASES
from tests.quantisation.grouped_checkpoints import pack_quantized
from tests.weights.packed import Tensors, random_tensors, write
from tests.weights.test_held import logits

FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
KINDS = {
    "q_proj": WeightFormat("int4", 8, form="zeros"),
    "k_proj": WeightFormat("int8", 16),
    "v_proj": WeightFormat("fp8"),
    "gate_proj": None,
    "up_proj": WeightFormat("int4", 8, form="zeros"),
}


def parts_of(module: str, plain: np.ndarray) -> tuple[Tensors, np.ndarray, dict[str, Any]]:
    """What a checkpoint stores for a matrix, its values, and its group of the configuration."""
    if module == "v_proj":
        values = (plain * 100).astype(ml_dtypes.float8_e4m3fn)
        scale = np.full((len(plain), 1), 0.01, np.float32)
        stored = {"weight": values, "weight_scale": scale}
        return stored, values.astype(np.float32) * scale, FLOATS
    size, bits, symmetric = (16, 8, True) if module == "k_proj" else (8, 4, False)
    made = pack_quantized((plain.shape[0], plain.shape[1]), size, bits, symmetric)
    stored = {leaf.removeprefix("X."): array for leaf, array in made.stored.items()}
    return stored, made.weight, made.settings["config_groups"]["group_0"]["weights"]


def mixed(path: Path, case: str) -> tuple[Path, models.ModelSpec, Path]:
    """A checkpoint with modules of `KINDS`, its spec with formats, and the plain one."""
    config, groups = CASES[case], {}
    plain = random_tensors(config)
    packed = dict(plain)
    for name in plain:
        module = name.split(".")[-2]
        if KINDS.get(module) and plain[name].ndim == 2:
            stored, plain[name], weights_ = parts_of(module, plain[name])
            form = "float-quantized" if module == "v_proj" else "pack-quantized"
            groups[module] = {"targets": [f"re:.*{module}$"], "weights": weights_, "format": form}
            del packed[name]
            owner = name.removesuffix("weight")
            packed |= {owner + leaf: array for leaf, array in stored.items()}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
    }
    own = write(path / "packed", config | {"quantization_config": settings}, packed)
    spec = models.read_spec(own)
    spec = replace(spec, formats=weights.weight_formats(own, spec, None))
    return own, spec, write(path / "plain", config, plain)


@pytest.mark.parametrize(
    ("case", "shards"),
    [
        ("llama-gqa", 1),
        pytest.param("llama-gqa", 2, marks=pytest.mark.slow),
        pytest.param("qwen2-tied", 4, marks=pytest.mark.slow),
    ],
)
def test_parts_in_unlike_formats_compute_what_their_values_do(
    tmp_path: Path, case: str, shards: int
) -> None:
    packed, spec, plain = mixed(tmp_path, case)
    held = {name.split(".")[-1]: kind for name, kind in spec.formats.items()}
    assert held == {module: kind for module, kind in KINDS.items() if kind}
    assert len(spec.formats) == len(held) * len(spec.layers)
    wanted = logits(plain, models.read_spec(plain))
    np.testing.assert_allclose(logits(packed, spec, shards), wanted, atol=2e-5)
