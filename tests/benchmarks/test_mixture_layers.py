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
@pytest.mark.parametrize("name", mixture_layers.VARIANTS)
def test_a_variant_can_be_lowered_for_a_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture_layers, "LAYERS", 1)
    variant = mixture_layers.VARIANTS[name]
    layers = jax.eval_shape(lambda: mixture_layers.made(SMALL, 1.2))
    x = jax.ShapeDtypeStruct((20, SMALL.width), jnp.bfloat16)
    run = jax.jit(lambda x, layers: mixture_layers.chained(x, layers, Rule(2), variant))
    text = run.trace(x, layers).lower(lowering_platforms=("cuda",)).as_text()
    # Norm, route, copy, two products or one launch, and the last norm, which adds up rows
    assert text.count("@mosaic_gpu_v2(") == (5 if variant.one_launch else 6)
