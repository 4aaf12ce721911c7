"""Weights of int32 words that stay in few bits on the devices compute what their values do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxllm import models, weights
from jaxllm.config import ConfigError
from jaxllm.mesh import make_mesh
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.nn.weight.schemes import rounded
from jaxllm.quantisation import WeightFormat
from jaxllm.quantisation.int4_rows import columns_of, row_bytes, rows_of
from pallas_kernels.int4_matmul import Int4
from pallas_kernels.int4_matmul.packed import dequantised
from tests.weights.packed import write
from tests.weights.test_grouped import pair
from tests.weights.test_held import TOKENS, logits
from tests.weights.test_rounding import LLAMA, online

FORMS = ("symmetric", "zeros", "offsets")
HELD = {
    "awq": WeightFormat("int4", 16, form="zeros"),
    "auto-round": WeightFormat("int4", 8, form="zeros"),
    "pack-quantized": WeightFormat("int4", 8, form="zeros"),
    "pack-quantized symmetric": WeightFormat("int4", None),
    "gptq": WeightFormat("int4", 8, form="zeros"),
    "gptq of 8 bits, symmetric": WeightFormat("int8", 16),
    "pack-quantized of 8 bits": WeightFormat("int8", 16),
    "gptq of 8 bits": WeightFormat("int8", None, form="offsets"),
    "gptq with groups in no order": WeightFormat("int4", 16, form="zeros", ordered=False),
}


def held(path: Path, case: str, kind: str) -> tuple[Path, models.ModelSpec, Path]:
    """A packed model directory, its spec with formats, and a plain one."""
    made, settings = pair(case, kind)
    packed = write(path / "packed", made.config | {"quantization_config": settings}, made.packed)
    spec = models.read_spec(packed)
    formats = weights.weight_formats(packed, spec, None)
    return packed, replace(spec, formats=formats), write(path / "plain", made.config, made.plain)


@pytest.mark.parametrize(
    ("kind", "case", "shards"),
    [
        ("awq", "llama-gqa", 1),
        ("pack-quantized symmetric", "llama-gqa", 2),
        ("gptq of 8 bits, symmetric", "llama-gqa", 1),
        ("gptq with groups in no order", "llama-gqa", 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("gptq", "llama-gqa", 1),
                ("pack-quantized of 8 bits", "qwen2-tied", 2),
                ("auto-round", "llama-gqa", 1),
                ("pack-quantized", "llama-mqa-tied-linear", 1),
                ("awq", "qwen2-tied", 2),
                ("pack-quantized", "glm-biases", 1),
                ("gptq with groups in no order", "glm-biases", 1),
                ("gptq of 8 bits", "llama-gqa", 2),
                ("gptq of 8 bits", "qwen3-moe-normalised", 1),
            )
        ),
    ],
)
def test_numbers_of_words_compute_what_their_values_do(
    tmp_path: Path, kind: str, case: str, shards: int
) -> None:
    packed, spec, plain = held(tmp_path, case, kind)
    assert set(spec.formats.values()) == {HELD[kind]}
    assert len(spec.formats) >= 6 * len(spec.layers)
    found = logits(packed, spec, shards)
    np.testing.assert_allclose(found, logits(plain, models.read_spec(plain)), atol=2e-5)


def test_zero_points_of_8_bits_that_settings_deny_are_named(tmp_path: Path) -> None:
    packed, spec, _ = held(tmp_path, "llama-gqa", "gptq of 8 bits, symmetric")
    made, settings = pair("llama-gqa", "gptq of 8 bits, symmetric")
    name = "model.layers.0.mlp.up_proj.qzeros"
    made.packed[name] = np.zeros_like(made.packed[name])
    write(packed, made.config | {"quantization_config": settings}, made.packed)
    with pytest.raises(ConfigError, match=f"{name} has the zero point 1, .* set sym to false"):
        logits(packed, spec)
    mixed = settings | {"dynamic": {"up_proj": {"sym": False}}}
    write(packed, made.config | {"quantization_config": mixed}, made.packed)
    formats = weights.weight_formats(packed, models.read_spec(packed), None)
    assert set(formats.values()) == {WeightFormat("int8", 16, form="offsets")}


def test_experts_with_groups_in_no_order_are_unpacked(tmp_path: Path) -> None:
    _, spec, _ = held(tmp_path, "qwen3-moe-normalised", "gptq with groups in no order")
    assert spec.formats
    assert not any(".experts." in name for name in spec.formats)


def test_inputs_in_the_order_of_groups_are_multiplied_in_16_bits(tmp_path: Path) -> None:
    packed, spec, _ = held(tmp_path, "llama-gqa", "gptq with groups in no order")
    graphdef, state = weights.load(packed, weights.outline(spec, make_mesh(1), jnp.bfloat16))

    @jax.jit  # a program of its own for each operation has nothing to fuse
    def compiled(state: nnx.State) -> jax.Array:
        model, token_T, context = nnx.merge(graphdef, state), jnp.arange(TOKENS), DenseContext()
        return model.logits(model(token_T, token_T, context), context)

    np.testing.assert_allclose(compiled(state), logits(packed, spec), atol=0.2)


def test_groups_of_uneven_sizes_are_named(tmp_path: Path) -> None:
    kind = "gptq with groups in no order"
    packed, spec, _ = held(tmp_path, "llama-gqa", kind)
    made, settings = pair("llama-gqa", kind)
    name = "model.layers.0.mlp.up_proj.g_idx"
    made.packed[name] = np.zeros_like(made.packed[name])
    write(packed, made.config | {"quantization_config": settings}, made.packed)
    with pytest.raises(ConfigError, match=f"{name} has groups of other sizes than 16 columns"):
        logits(packed, spec)


def test_groups_in_no_order_that_the_settings_deny_are_named(tmp_path: Path) -> None:
    made, settings = pair("llama-gqa", "gptq with groups in no order")
    settings = settings | {"desc_act": False}
    path = write(tmp_path / "x", made.config | {"quantization_config": settings}, made.packed)
    spec = models.read_spec(path)
    spec = replace(spec, formats=weights.weight_formats(path, spec, None))
    with pytest.raises(ConfigError, match=r"_proj.g_idx has groups in another order .*desc_act"):
        logits(path, spec)


def values(made: dict[str, jax.Array], kind: WeightFormat, shape: tuple[int, int]) -> np.ndarray:
    """The weight that parameters stand for, float32."""
    others = made.get("others")
    group = kind.group or shape[1] + -shape[1] % 128
    own = Int4(
        made["values"],
        made["scales"],
        None if kind.form == "offsets" else others,
        others if kind.form == "offsets" else None,
        rows=shape[0],
        group=group,
    )
    return np.asarray(dequantised(own, shape[1], jnp.float32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("group", [None, 32])
def test_bytes_of_rows_become_the_words_of_their_values(group: int | None, form: str) -> None:
    rng, (rows, columns) = np.random.default_rng(0), (72, 100)
    numbers = rng.integers(0, 16, (rows, columns))
    groups = (rows, 1 if group is None else -(-columns // group))
    scales = rng.uniform(0.01, 0.1, groups).astype(np.float32)
    others: dict[str, Any] = {
        "symmetric": None,
        "zeros": rng.integers(0, 16, groups),
        "offsets": rng.normal(0, 1, groups).astype(np.float32),
    }
    kind = WeightFormat("int4", group, form=form)
    given = rows_of(numbers, scales, others[form])
    assert given.shape == (rows, row_bytes(kind, columns))
    spread = lambda a: np.repeat(a, group or columns, 1)[:, :columns].astype(np.float32)
    if form == "offsets":
        wanted = numbers.astype(np.float32) * spread(scales) + spread(others[form])
    else:
        zeros = 8 if others[form] is None else spread(others[form])
        wanted = (numbers - zeros).astype(np.float32) * spread(scales)
    made = rounded(kind, jnp.asarray(given))
    np.testing.assert_allclose(values(made, kind, (rows, columns)), wanted, rtol=1e-6, atol=1e-6)


@given(
    columns=st.integers(1, 4000).map(lambda x: 2 * x),
    group=st.sampled_from([None, 8, 16, 32, 100, 128]),
    form=st.sampled_from(FORMS),
)
def test_the_bytes_of_a_row_tell_its_columns(columns: int, group: int | None, form: str) -> None:
    kind = WeightFormat("int4", group, form=form)
    assert columns_of(kind, row_bytes(kind, columns)) == columns


def test_plain_weights_become_the_nearest_of_16_numbers_a_group() -> None:
    rng, kind = np.random.default_rng(0), WeightFormat("int4", 128, form="zeros", rounded=True)
    plain = rng.normal(0, 0.1, (64, 256)).astype(np.float32)
    plain[3, :128] = 0
    plain[4] = np.abs(plain[4]) + 1  # a range without zero is widened to it
    made = rounded(kind, jnp.asarray(plain))
    error = np.abs(values(made, kind, plain.shape) - plain).reshape(64, 2, 128).max(-1)
    groups = plain.reshape(64, 2, 128)
    spans = np.maximum(groups.max(-1), 0) - np.minimum(groups.min(-1), 0)
    assert (error <= spans / 15 * 1.01).all() and not error[3, 0]
    assert error.mean() < spans.mean() / 15 * 0.6


def test_online_numbers_take_a_quarter_of_the_bytes() -> None:
    spec, mesh = online(LLAMA, "int4"), make_mesh(1)
    assert len(spec.formats) == 7 * len(spec.layers)
    _, state = weights.load(LLAMA, weights.outline(spec, mesh, jnp.bfloat16))
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    scales = [leaf for name, leaf in found.items() if ".weight.scales" in name]
    assert len(scales) == 4 * len(spec.layers)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in scales)
    words = [leaf for name, leaf in found.items() if ".weight.values" in name]
    assert all(leaf.dtype == jnp.int32 and leaf.shape[2:] == (2, 256) for leaf in words)
