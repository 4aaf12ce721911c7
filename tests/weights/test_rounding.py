"""Plain weights that are rounded to 8 bits while they are loaded."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxllm import models, weights
from jaxllm.config import ConfigError
from jaxllm.mesh import make_mesh
from jaxllm.models.config.build import linear_maps, outline
from jaxllm.nn.contexts.dense import DenseContext
from jaxllm.quantisation import ONLINE
from jaxllm.weights.rounding import Rounding

GOLDENS = Path(__file__).parents[1] / "goldens"
LLAMA = GOLDENS / "llama-gqa"
TOKENS = 12


def logits(path: Path, spec: models.ModelSpec, shards: int = 1, form: str = "auto") -> np.ndarray:
    graphdef, state = weights.load(
        path, weights.outline(spec, make_mesh(shards), jnp.float32), form
    )
    model, token_T = nnx.merge(graphdef, state), jnp.arange(TOKENS) % spec.vocab_size
    context = DenseContext()
    return np.asarray(model.logits(model(token_T, token_T, context), context))


def online(path: Path, wish: str) -> models.ModelSpec:
    spec = models.read_spec(path)
    return replace(spec, formats=weights.weight_formats(path, spec, wish))


def by_rows(weight: np.ndarray, limit: float, number: Callable[[np.ndarray], np.ndarray]):
    scale = np.abs(weight).max(axis=1, keepdims=True) * np.float32(1 / limit)
    return number(weight * (1 / scale)).astype(np.float32) * scale


ROUNDED = {
    "fp8_w8a16": lambda w: by_rows(w, 448, lambda x: x.astype(ml_dtypes.float8_e4m3fn)),
    "int8_w8a16": lambda w: by_rows(w, 127, np.rint),
}


@pytest.mark.parametrize(
    ("case", "wish", "shards"),
    [
        ("llama-gqa", "fp8_w8a16", 1),
        ("llama-gqa", "int8_w8a16", 2),
        # Heads in another order, gate and up in one tensor; matrices stored as [in, out]
        pytest.param("glm-biases", "int8_w8a16", 1, marks=pytest.mark.slow),
        pytest.param("gpt2-tied", "fp8_w8a16", 1, marks=pytest.mark.slow),
        pytest.param("deepseek-v3-groups", "int8_w8a16", 1, marks=pytest.mark.slow),
        pytest.param("llama-head-dim-sharded", "fp8_w8a16", 8, marks=pytest.mark.slow),
        pytest.param("phi3-window", "fp8_w8a16", 2, marks=pytest.mark.slow),
        pytest.param("chatglm-groups", "fp8_w8a16", 1, marks=pytest.mark.slow),
    ],
)
def test_rounded_weights_compute_what_their_values_do(
    tmp_path: Path, case: str, wish: str, shards: int
) -> None:
    spec = online(path := GOLDENS / case, wish)
    tensors = {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    turned = {n for m, own in maps(spec) if m.layout.name == "IN_OUT" for n in own}
    for name in (name for name in spec.formats if f"{name}.weight" in tensors):
        axis = 1 if name in turned else 0
        weight = np.moveaxis(tensors[f"{name}.weight"], axis, 0).astype(np.float32)
        rounded = np.moveaxis(ROUNDED[wish](weight), 0, axis)
        tensors[f"{name}.weight"] = np.ascontiguousarray(rounded)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(spec.config, default=str))
    plain = logits(tmp_path, replace(spec, formats={}))
    np.testing.assert_allclose(logits(path, spec, shards), plain, atol=3e-5)
    assert np.abs(plain - logits(path, replace(spec, formats={}))).max() > 1e-3


def maps(spec: models.ModelSpec):
    return ((m, own) for _, m, own in linear_maps(spec, outline(spec, 1, np.float32)))


@pytest.mark.slow
@pytest.mark.parametrize("wish", ["fp8", "int8"])
def test_rounded_inputs_cost_little_beside_rounded_weights(wish: str) -> None:
    plain = logits(LLAMA, models.read_spec(LLAMA))
    both, alone = (logits(LLAMA, online(LLAMA, each)) for each in (wish, f"{wish}_w8a16"))
    assert not np.array_equal(both, alone)
    assert np.abs(both - plain).mean() < 2 * np.abs(alone - plain).mean()


@pytest.mark.slow
def test_random_weights_are_those_of_the_plain_model_rounded() -> None:
    spec = online(LLAMA, "int8_w8a16")
    plain, rounded = (
        logits(LLAMA, each, form="dummy") for each in (replace(spec, formats={}), spec)
    )
    assert 0 < np.abs(plain - rounded).mean() < 0.02 * np.abs(plain).mean()


def test_a_device_holds_one_plain_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real, held, most = Rounding.finished, threading.Semaphore(1), []

    def finished(self, rule, plain):
        if rule.rounded is None:
            return real(self, rule, plain)
        assert held.acquire(blocking=False)
        made = real(self, rule, plain)
        most.append(plain.is_deleted())
        held.release()
        return made

    monkeypatch.setattr(Rounding, "finished", finished)
    spec = online(LLAMA, "fp8")
    weights.load(LLAMA, weights.outline(spec, make_mesh(1), jnp.bfloat16))
    assert most == [True] * 4 * len(spec.layers)


def test_rounded_weights_are_where_room_was_made_before_any_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places: dict[str, set[int]] = {"made before": set(), "given": set()}
    real_room, real_finished = Rounding.take_room, Rounding.finished

    def where(arrays) -> set[int]:
        return {array.unsafe_buffer_pointer() for array in arrays}

    def take_room(self, rules):
        real_room(self, rules)
        places["made before"] = where(self._room.values())

    def finished(self, rule, plain):
        made = real_finished(self, rule, plain)
        if rule.rounded is not None:
            places["given"] |= where(made.values())
        else:
            assert not places["given"], f"{rule.parameter} is plain and behind rounded ones"
        return made

    monkeypatch.setattr(Rounding, "take_room", take_room)
    monkeypatch.setattr(Rounding, "finished", finished)
    weights.load(LLAMA, weights.outline(online(LLAMA, "fp8"), make_mesh(1), jnp.bfloat16), "dummy")
    assert places["given"] == places["made before"] and places["given"]


def test_numbers_take_half_the_bytes_and_the_head_stays_plain() -> None:
    spec, mesh = online(LLAMA, "fp8"), make_mesh(1)
    state = weights.outline(spec, mesh, jnp.bfloat16).state
    found = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    values = {name for name in found if ".weight.values" in name}
    assert len(values) == 4 * len(spec.layers)
    assert all(found[name].dtype == jnp.float8_e4m3fn for name in values)
    assert all(leaf.dtype == jnp.bfloat16 for name, leaf in found.items() if "head" in name)


def test_a_spec_carries_its_formats_to_other_processes() -> None:
    spec = online(LLAMA, "fp8")
    assert len(spec.formats) == 7 * len(spec.layers)
    again = models.make_spec(**json.loads(json.dumps(spec.to_dict())))
    assert again.formats == spec.formats


def test_wishes_that_cannot_be_had_are_named() -> None:
    spec = models.read_spec(LLAMA)
    with pytest.raises(ConfigError, match=r"awq does not fit .* plain: fp8, .*leave it out"):
        weights.weight_formats(LLAMA, spec, "awq")
    packed = replace(spec, scheme=type("Packed", (), {"method": "fp8"})())
    with pytest.raises(ConfigError, match=r"int8 does not fit .* packed as fp8; leave it out"):
        weights.weight_formats(LLAMA, packed, "int8")
    assert set(ONLINE) == {"fp8", "fp8_w8a16", "int4", "int8", "int8_w8a16"}
