"""A mixture's half of a layer and its variants: every program can be lowered for a card."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks import mixture_layers
from pallas_kernels.grouped_matmul.cases import ModelShape
from pallas_kernels.route import Rule

SMALL = ModelShape(experts=4, choices=2, width=256, inner=256)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        *((name, "bf16") for name in mixture_layers.VARIANTS),
        *((name, "fp8") for name in ("now", "warpgroups 2", "added before")),
    ],
)
def test_a_variant_can_be_lowered_for_a_card(
    name: str, numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixture_layers, "LAYERS", 1)
    variant = mixture_layers.VARIANTS[name]
    layers = jax.eval_shape(lambda: mixture_layers.made(SMALL, numbers))
    x = jax.ShapeDtypeStruct((20, SMALL.width), jnp.bfloat16)
    run = jax.jit(lambda x, layers: mixture_layers.chained(x, layers, Rule(2), variant))
    text = run.trace(x, layers).lower(lowering_platforms=("cuda",)).as_text()
    # Norm, route, copy, one launch or two, with rows rounded between, and the norm that adds up
    one = numbers == "bf16" and variant.launches != 2
    products = 1 if one else 3 if numbers == "fp8" else 2
    assert text.count("@mosaic_gpu_v2(") == 4 + products


def test_what_8_bits_do_not_have_is_refused() -> None:
    layers = jax.eval_shape(lambda: mixture_layers.made(SMALL, "fp8"))
    x = jax.ShapeDtypeStruct((20, SMALL.width), jnp.bfloat16)
    (name, why), *_ = mixture_layers.compiled(x, layers, Rule(2), ["one launch"]).items()
    assert name == "one launch" and "8 bits have two launches" in why
