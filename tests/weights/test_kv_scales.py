"""A checkpoint's own scales of keys and values: found under every name, loaded onto every shard."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import models, weights
from jaxllm.mesh import make_mesh
from tests.goldens.golden import load_golden
from tests.weights.scaled import (
    BY_HEAD,
    HEADS,
    LLAMA,
    SCALES,
    by_head,
    checkpoint,
    extended,
    named,
)


@pytest.mark.parametrize(
    ("key", "value", "shape"),
    [
        ("k_scale", "v_scale", ()),
        ("attn.k_scale", "attn.v_scale", (1,)),
        ("k_proj.k_scale", "v_proj.v_scale", (1, 1)),
        ("k_proj.output_scale", "v_proj.output_scale", ()),
    ],
)
def test_scales_are_found_under_every_name(
    tmp_path: Path, key: str, value: str, shape: tuple[int, ...]
) -> None:
    path = checkpoint(tmp_path, named(key, value, shape=shape))
    names = [
        tuple((f"model.layers.{i}.self_attn.{name}", shape) for name in (key, value))
        for i in range(2)
    ]
    spec = models.read_spec(path)
    assert weights.kv_scales(path, spec) == names
    assert weights.kv_scales(path, spec, "dummy") == []


@pytest.mark.parametrize(
    ("golden", "prefix", "attention"),
    [
        ("internlm2-dynamic", "", "model.layers.{}.attention"),
        ("falcon-groups", "", "transformer.h.{}.self_attention"),
        ("mistral3-vision", "language_model.", "model.layers.{}.self_attn"),
    ],
)
def test_scales_lie_in_what_the_family_calls_its_attention(
    tmp_path: Path, golden: str, prefix: str, attention: str
) -> None:
    base = load_golden(golden).directory
    layers = len(models.read_spec(str(base)).layers)
    extra = {
        f"{prefix}{attention.format(layer)}.{name}": scale
        for layer in range(layers)
        for name, scale in {"k_scale": 0.5, "v_scale": 0.25, "q_scale": 1.0}.items()
    }
    path = extended(base, tmp_path, extra)
    plain = models.read_spec(path)
    # Scales that nobody asks for
    weights.check(path, weights.outline(plain, make_mesh(1), jnp.float32))
    spec = plain.with_scales(weights.kv_scales(path, plain))
    assert [layer.scales for layer in spec.layers] == [
        tuple((f"{attention.format(layer)}.{name}", ()) for name in ("k_scale", "v_scale"))
        for layer in range(layers)
    ]
    _, state = weights.load(path, weights.outline(spec, make_mesh(1), jnp.float32))
    found = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.bfloat16]
    assert len(found) == layers
    for leaf in found:
        np.testing.assert_array_equal(
            leaf, jnp.asarray([[0.5, 0.25]] * leaf.shape[0], jnp.bfloat16)
        )


def test_one_scale_may_be_for_keys_and_values(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, {"1.self_attn.kv_scale": SCALES[1, 0]})
    assert weights.kv_scales(path, models.read_spec(path)) == [
        None,
        (("model.layers.1.self_attn.kv_scale", ()),) * 2,
    ]
    assert weights.kv_scales(LLAMA, models.read_spec(str(LLAMA))) == []


def test_processes_that_lower_are_told_of_the_scales(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, named("k_scale", "v_scale", shape=(1,)))
    spec = models.read_spec(path)
    spec = spec.with_scales(weights.kv_scales(path, spec))
    sent = models.make_spec(**json.loads(json.dumps(spec.to_dict())))
    assert sent == spec
    here, there = (weights.outline(each, make_mesh(2), jnp.bfloat16) for each in (spec, sent))
    assert here.graphdef == there.graphdef
    assert jax.tree.structure(here.state) == jax.tree.structure(there.state)
    assert [leaf.sharding for leaf in jax.tree.leaves(here.state)] == [
        leaf.sharding for leaf in jax.tree.leaves(there.state)
    ]
    assert sum(leaf.shape == (HEADS, 2) for leaf in jax.tree.leaves(here.state)) == 2


@pytest.mark.parametrize("shape", [(HEADS,), (HEADS, 1, 1), (1, HEADS, 1), ()])
def test_every_shard_gets_the_scales_of_its_heads(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = checkpoint(tmp_path, by_head(shape) if shape else named("k_scale", "v_scale"))
    spec = models.read_spec(path)
    spec = spec.with_scales(weights.kv_scales(path, spec))
    _, state = weights.load(path, weights.outline(spec, make_mesh(4), jnp.float32))
    wanted = jnp.asarray(
        BY_HEAD if shape else SCALES[..., None].repeat(HEADS, axis=-1), jnp.bfloat16
    )
    found = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.bfloat16]
    for layer, leaf in enumerate(found):
        np.testing.assert_array_equal(
            leaf, wanted[layer].repeat(2, axis=1).T, err_msg="each head serves two shards"
        )
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(1, 2)}
    assert len(found) == 2
