"""Weights of 4 bits whose inputs are rounded to 8 compute what their values do, with inputs rounded
alike."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import models, weights
from jaxllm.nn.contexts.protocol import RowContext
from jaxllm.nn.weight.dense import Dense
from jaxllm.nn.weight.parameters import contract
from jaxllm.nn.weight.table import takes, takes_head
from jaxllm.quantisation import WeightFormat
from pallas_kernels.scaled_matmul import in_steps, rounded
from tests.weights.packed import write
from tests.weights.test_grouped import pair
from tests.weights.test_held import integers, logits, with_scales

INPUTS = {
    "int8": ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, integers),
    "fp8": (
        {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        lambda x: with_scales(x, x.shape[-1]),
    ),
}


@pytest.mark.parametrize(
    ("numbers", "kind", "case"),
    [
        ("int8", "pack-quantized", "llama-gqa"),
        ("fp8", "pack-quantized symmetric", "llama-gqa"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("fp8", "pack-quantized", "glm-biases"),
                ("int8", "pack-quantized symmetric", "qwen3-moe-normalised"),
            )
        ),
    ],
)
def test_products_are_those_of_inputs_rounded_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: str, kind: str, case: str
) -> None:
    made, settings = pair(case, kind)
    inputs, rounding = INPUTS[numbers]
    settings = copy.deepcopy(settings)
    settings["config_groups"]["group_0"]["input_activations"] = inputs
    config = made.config | {"quantization_config": settings}
    packed = write(tmp_path / "packed", config, made.packed)
    spec = models.read_spec(packed)
    assert spec.scheme is not None and spec.scheme.title.endswith(f", inputs in {numbers}")
    spec = replace(spec, formats=weights.weight_formats(packed, spec, None))
    (found,) = set(spec.formats.values())
    assert (found.numbers, found.inputs, found.input_numbers) == ("int4", "token", numbers)
    assert f"inputs in {numbers} with scales of tokens" in found.title
    of_experts = any(".experts." in name for name in spec.formats)
    own = logits(packed, spec)
    if of_experts:  # as it would be with inputs as they are, but for their rounding
        exact = replace(found, inputs="plain", input_numbers=None)
        other = replace(spec, formats=dict.fromkeys(spec.formats, exact))
        assert 0 < np.abs(own - logits(packed, other)).max() < 0.2
        return

    def product(self: Dense, x: jax.Array, dims: int, context: RowContext) -> jax.Array:
        flat = x.reshape(*x.shape[: x.ndim - dims], -1)
        return contract(rounding(flat).reshape(x.shape), self[...], dims)

    monkeypatch.setattr(Dense, "product", product)
    monkeypatch.setattr(Dense, "part", product)
    plain = write(tmp_path / "plain", made.config, made.plain)
    np.testing.assert_allclose(own, logits(plain, models.read_spec(plain)), atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("numbers", [jnp.int8, jnp.float8_e4m3fn])
def test_steps_are_rounded_numbers_in_any_type(numbers: jnp.dtype, dtype: jnp.dtype) -> None:
    x_TI = jnp.asarray(np.random.default_rng(0).normal(size=(5, 200)), dtype)
    x_TI = x_TI.at[1].multiply(1e-3).at[2].set(0).at[3, 7].set(2000)
    steps, scale = in_steps(x_TI, numbers)
    wanted, own = rounded(x_TI, numbers, 200)
    assert steps.dtype == dtype and np.abs(steps.astype(jnp.float32)).max() <= 1
    np.testing.assert_array_equal(
        steps.astype(jnp.float32) * scale, wanted.astype(jnp.float32) * own
    )


def test_tables_and_heads_have_no_inputs_to_round() -> None:
    kind = WeightFormat("int4", 128, "token", input_numbers="fp8")
    assert not takes(kind) and not takes_head(kind, 128)
    assert takes(WeightFormat("int4", 128))
