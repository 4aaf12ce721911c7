"""Whole step programs for accelerators that are not here: lowered on the CPU, and compiled for TPU
where libtpu is installed."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxllm import models, weights
from jaxllm.cache.groups import Place
from jaxllm.engine.runtime.lattice import Programs, forward_key, weight_leaves
from jaxllm.engine.runtime.program import Key
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.mesh import WHOLE, Stage, make_mesh
from tests.by_layer import abstract_kv
from tests.engine.conftest import TINY
from tests.engine.runtime.step_programs import lattice

REAL_HEADS = TINY | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
PAGE, PAGES, SLOTS = 16, 8192, 4
CALLS = {"cuda": "mosaic_gpu_v2", "tpu": "tpu_custom_call"}


@functools.cache
def programs_of(mesh: Mesh, backend: str, page: int = PAGE, kv_dtype: str = "bfloat16") -> Programs:
    """The lattice of a tiny model whose heads have a size that kernels take."""
    buckets = Buckets.build(SLOTS, 1024, "cpu")
    return lattice(
        REAL_HEADS, mesh, backend, buckets, page_size=page, pages=PAGES, kv_dtype=kv_dtype
    )


def traced(programs: Programs, kind: str) -> Any:
    """The largest program of a kind, traced."""
    buckets = programs.shapes.buckets
    shape = max((s for s in buckets.extend if s.decodes), key=lambda s: s.tokens)
    recipe = programs.recipe(forward_key(max(buckets.decode) if kind == "decode" else shape))
    return jax.jit(recipe.function, donate_argnums=recipe.donated).trace(*recipe.arguments)


# Tests below lower for one device
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("kind", ["decode", "extend"])
@pytest.mark.parametrize(
    ("platform", "backend"),
    [("cuda", "mosaic_gpu"), ("cuda", "xla"), ("tpu", "mosaic_tpu"), ("tpu", "xla")],
)
def test_a_step_lowers_for_a_device_that_is_not_here(
    platform: str, backend: str, kind: str, shards: int
) -> None:
    lowered = traced(programs_of(make_mesh(shards), backend), kind).lower(
        lowering_platforms=(platform,)
    )
    assert (CALLS[platform] in lowered.as_text()) == (backend != "xla")


# The write, and each attention
@pytest.mark.parametrize(("kind", "kernels"), [("decode", 2), ("extend", 3)])
@pytest.mark.parametrize(("platform", "backend"), [("cuda", "mosaic_gpu"), ("tpu", "xla")])
def test_a_step_over_8_bit_pages_lowers(
    platform: str, backend: str, kind: str, kernels: int
) -> None:
    lowered = traced(programs_of(make_mesh(1), backend, 64, "float8_e4m3fn"), kind).lower(
        lowering_platforms=(platform,)
    )
    calls = re.findall(r"custom_call @(\w+)\(", lowered.as_text())
    assert calls.count(CALLS[platform]) == (0 if backend == "xla" else kernels)


@pytest.mark.parametrize("shards", [1, 4])
def test_a_step_with_a_checkpoints_scales_lowers(shards: int) -> None:
    mesh = make_mesh(shards)
    given = programs_of(mesh, "mosaic_gpu", 64, "float8_e4m3fn")
    tensors = [("k_scale", ()), ("v_scale", ())]
    spec = models.make_spec(REAL_HEADS, scales=[tensors] * 2)
    outline = weights.outline(spec, mesh, jnp.bfloat16)
    leaves, treedef = weight_leaves(outline.state)
    assert len(leaves) == len(given.shapes.weights) + 2
    model = replace(given.shapes.model, graphdef=outline.graphdef, treedef=treedef)
    shapes = replace(given.shapes, model=model, weights=leaves)
    text = traced(Programs(shapes), "decode")
    calls = re.findall(r"custom_call @(\w+)\(", text.lower(lowering_platforms=("cuda",)).as_text())
    assert calls.count(CALLS["cuda"]) == 2


@pytest.mark.parametrize("kind", ["decode", "extend"])
@pytest.mark.parametrize(("platform", "backend"), [("cuda", "mosaic_gpu"), ("tpu", "mosaic_tpu")])
def test_a_step_over_two_kinds_of_layers_lowers(platform: str, backend: str, kind: str) -> None:
    given, mesh = programs_of(make_mesh(1), backend), make_mesh(1)
    spec = models.make_spec(
        REAL_HEADS | {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    )
    kv = tuple(
        arrays
        for pages in (PAGES, 512)
        for arrays in abstract_kv(1, pages, 8, PAGE, 128, jnp.bfloat16, mesh)
    )
    model = replace(
        given.shapes.model,
        graphdef=weights.outline(spec, mesh, jnp.bfloat16).graphdef,
        places=(Place(0, 0), Place(1, 0)),
    )
    programs = Programs(replace(given.shapes, model=model, kv=kv, table_width=2 * 16))
    assert CALLS[platform] in traced(programs, kind).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_log_probabilities_lower_for_a_device_that_is_not_here(
    platform: str, mode: str, shards: int
) -> None:
    base = programs_of(make_mesh(shards), "xla")
    programs = Programs(replace(base.shapes, max_logprobs=20, logprobs_mode=mode))
    for key in (
        Key("logprobs", (base.shapes.buckets.logits[-1], 20)),
        Key("prompt_logprobs", (base.shapes.buckets.score, 20)),
    ):
        recipe = programs.recipe(key)
        text = (
            jax.jit(recipe.function)
            .trace(*recipe.arguments)
            .lower(lowering_platforms=(platform,))
            .as_text()
        )
        assert "stablehlo.sort" not in text and "top_k" not in text


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_what_shapes_logits_lowers_for_a_device_that_is_not_here(
    platform: str, shards: int
) -> None:
    programs = programs_of(make_mesh(shards), "xla")
    for key in [
        Key("process_logits", (programs.shapes.buckets.logits[-1],)),
        Key("set_slot"),
        Key("apply_token_bitmask"),
    ]:
        recipe = programs.recipe(key)
        jitted = jax.jit(
            recipe.function,
            donate_argnums=recipe.donated,
            out_shardings=recipe.out,
            keep_unused=True,
        )
        assert (
            "stablehlo"
            in jitted.trace(*recipe.arguments).lower(lowering_platforms=(platform,)).as_text()
        )


def test_programs_for_a_gpu_meet_the_host_in_pinned_memory_wherever_they_are_lowered() -> None:
    base = replace(programs_of(make_mesh(1), "xla").shapes, max_logprobs=20)
    for platform, kind in (("gpu", "pinned_host"), ("cpu", base.replicated.memory_kind)):
        programs = Programs(replace(base, platform=platform))
        recipe = programs.recipe(Key("prompt_logprobs", (base.buckets.score, 20)))
        assert recipe.arguments[-1].sharding.memory_kind == kind


@pytest.mark.slow
# A program for an absent device cannot be loaded
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
@pytest.mark.parametrize("backend", ["mosaic_tpu", "xla"])
@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_the_tpu_compiler_takes_a_step_of_four_devices_and_writes_pages_in_place(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # no TPU here to ask about
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    programs = programs_of(make_mesh(4, devices), backend)
    compiled = traced(programs, kind).lower().compile()
    own = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(programs.shapes.kv)) // 4
    assert compiled.memory_analysis().alias_size_in_bytes >= own
    assert (
        re.findall(
            rf" = \(?bf16\[{2 * PAGES},2,{PAGE},128\].* (?:copy|copy-start)\(", compiled.as_text()
        )
        == []
    )


@pytest.mark.parametrize("stage", [WHOLE, Stage(0, 2)])
@pytest.mark.parametrize("shards", [1, 4])
def test_profiles_show_a_forward_by_the_name_of_its_function(shards: int, stage: Stage) -> None:
    given = programs_of(make_mesh(shards), "xla")
    programs = Programs(replace(given.shapes, stage=stage))
    hands = "" if stage.is_last else "hand_"
    for kind in ("decode", "extend"):
        assert traced(programs, kind).fun_name == hands + kind
