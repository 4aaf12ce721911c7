"""From a model directory to parameters on the mesh."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import models, weights
from jaxllm.config import ConfigError
from jaxllm.mesh import make_mesh
from jaxllm.models.config import build
from jaxllm.weights import blocks
from tests.goldens.golden import golden_names, load_golden

Tensors = dict[str, np.ndarray]
LLAMA = load_golden("llama-gqa").directory
TIED = load_golden("llama-mqa-tied-linear").directory
LAYER = "model.layers.0"


def named(state: object) -> dict[str, jax.Array]:
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def copy(source: Path, target: Path, change: Callable[[Tensors], None]) -> Path:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    shutil.copy(source / "config.json", target)
    save_file(tensors, target / "model.safetensors")
    return target


def load(
    path: Path,
    shards: int = 1,
    dtype: jax.typing.DTypeLike = jnp.float32,
    load_format: str = "auto",
) -> dict[str, jax.Array]:
    _, state = weights.load(
        path, weights.outline(models.read_spec(path), make_mesh(shards), dtype), load_format
    )
    return named(state)


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_abstract_describes_exactly_what_is_loaded(shards: int, load_format: str) -> None:
    spec, mesh = models.read_spec(LLAMA), make_mesh(shards)
    outline = weights.outline(spec, mesh, jnp.bfloat16)
    graphdef, state = weights.load(LLAMA, outline, load_format)
    assert graphdef == outline.graphdef
    assert jax.tree.structure(state) == jax.tree.structure(outline.state)
    for found, like in zip(jax.tree.leaves(state), jax.tree.leaves(outline.state), strict=True):
        assert (found.shape, found.dtype) == (like.shape, like.dtype)
        assert found.sharding.is_equivalent_to(like.sharding, found.ndim)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_each_shard_holds_the_heads_that_belong_together(shards: int) -> None:
    tensors = load_file(LLAMA / "model.safetensors")
    query, key, value = (
        tensors[f"{LAYER}.self_attn.{n}_proj.weight"].reshape(-1, 4, 32) for n in "qkv"
    )
    found = np.asarray(load(LLAMA, shards)["layers.0.attention.qkv.weight.value"])
    repeat = max(1, shards // 2)
    for x in range(shards):
        heads = [
            np.split(query, shards)[x],
            *(np.split(np.repeat(part, repeat, 0), shards)[x] for part in (key, value)),
        ]
        np.testing.assert_array_equal(found[x], np.concatenate(heads))


def test_a_device_holds_its_shard_alone() -> None:
    parameters = load(LLAMA, 8)
    for name in ("attention.qkv", "mlp.gate_up"):
        shards = parameters[f"layers.1.{name}.weight.value"].addressable_shards
        assert [s.data.shape[0] for s in shards] == [1] * 8
    assert {
        s.data.shape for s in parameters["layers.0.attention.out.weight.value"].addressable_shards
    } == {(32, 1, 4)}
    assert {s.data.shape for s in parameters["head.weight.value"].addressable_shards} == {(12, 32)}
    assert parameters["embed.weight.value"].sharding.is_fully_replicated  # saves a sum


def test_only_the_slices_of_a_shard_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    original = blocks._copy
    monkeypatch.setattr(
        blocks,
        "_copy",
        lambda target, source, name: (copied.append(target.nbytes), original(target, source, name)),
    )
    parameters = load(LLAMA, 8)
    replicated = sum(a.nbytes for a in parameters.values() if a.sharding.is_fully_replicated)
    assert sum(copied) == replicated + sum(
        a.nbytes for a in parameters.values() if not a.sharding.is_fully_replicated
    )
    whole, *parts = sorted(copied, reverse=True)
    assert whole == parameters["embed.weight.value"].nbytes
    assert parts[0] <= max(a.nbytes for a in parameters.values()) // 8


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_weights_are_cast_while_they_are_read(dtype: jax.typing.DTypeLike) -> None:
    found = load(LLAMA, dtype=dtype)["layers.0.mlp.down.weight.value"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(
        found, load_file(LLAMA / "model.safetensors")[f"{LAYER}.mlp.down_proj.weight"].astype(dtype)
    )


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_a_value_beyond_float16_is_an_error_and_no_infinity(tmp_path: Path, stored: type) -> None:
    def grow(tensors: Tensors) -> None:
        tensors[f"{LAYER}.mlp.up_proj.weight"] = np.full((48, 32), 1e6, stored)

    with pytest.raises(
        ConfigError, match=r"layers\.0\.mlp\.gate_up\.weight has values beyond the range of float16"
    ):
        load(copy(LLAMA, tmp_path, grow), dtype=jnp.float16)


def test_one_error_names_everything_that_does_not_fit(tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["lm_head.weight"], tensors[f"{LAYER}.self_attn.q_proj.weight"]
        tensors["model.extra"] = np.zeros(2, np.float32)
        tensors["model.norm.weight"] = np.ones(31, np.float32)
        tensors[f"{LAYER}.mlp.up_proj.weight"] = np.zeros((48, 32), np.int8)

    with pytest.raises(ConfigError) as error:
        load(copy(LLAMA, tmp_path, damage))
    text = str(error.value)
    assert "\n" not in text
    for part in (
        "missing lm_head.weight (where the embedding is the head, set tie_word_embeddings to true)",
        f"missing {LAYER}.self_attn.q_proj.weight",
        "unexpected model.extra",
        "model.norm.weight has shape [31], expected [32]",
        f"{LAYER}.mlp.up_proj.weight has dtype I8",
    ):
        assert part in text


def test_a_truncated_file_names_the_tensors_that_are_cut(tmp_path: Path) -> None:
    path = copy(LLAMA, tmp_path, lambda tensors: None)
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-200])
    with pytest.raises(
        ConfigError, match=r"model\.safetensors: [\w.]+ is truncated: it ends at .*; download it"
    ):
        load(path)


def test_the_error_stays_short_when_everything_is_missing(tmp_path: Path) -> None:
    path = copy(
        LLAMA,
        tmp_path,
        lambda tensors: tensors.update(
            {f"junk.{i}" * 50: np.zeros(1, np.float32) for i in range(500)}
        ),
    )
    with pytest.raises(ConfigError, match="and 480 more") as error:
        load(path)
    assert len(str(error.value)) < 5000


def test_a_config_of_other_sizes_does_not_fit(tmp_path: Path) -> None:
    path = copy(LLAMA, tmp_path, lambda tensors: None)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 3, "vocab_size": 97})
    )
    with pytest.raises(
        ConfigError,
        match=r"missing model\.layers\.2\..*"
        r"embed_tokens\.weight has shape \[96, 32\], expected \[97, 32\]",
    ):
        load(path)


ABSURD = 2**31 - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 4096}, "num_hidden_layers is 4096, the files hold 2 layers"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, the files hold 2 layers"),
        (
            {"vocab_size": ABSURD},
            r"embed_tokens\.weight has shape \[96, 32\], expected \[2147483647",
        ),
        ({"hidden_size": ABSURD, "head_dim": 4}, r"norm\.weight has shape \[32\], expected \[2147"),
        ({"intermediate_size": ABSURD}, r"up_proj\.weight has shape \[48, 32\], expected \[2147"),
        ({"num_key_value_heads": 1}, r"k_proj\.weight has shape \[8, 32\], expected \[4, 32\]"),
    ],
)
def test_sizes_are_compared_with_the_files_before_anything_is_built(
    changes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = models.make_spec(models.read_config(LLAMA) | changes)
    built: list[int] = []
    real = build.outline
    monkeypatch.setattr(
        build,
        "outline",
        lambda spec, *rest: (built.append(len(spec.layers)), real(spec, *rest))[1],
    )
    with pytest.raises(ConfigError, match=rf"does not fit its config\.json: .*{message}"):
        weights.check_shapes(LLAMA, spec)
    assert built == [1]
    weights.check_shapes(LLAMA, spec, "dummy")
    assert built == [1], "random weights have any shape"


def test_names_of_another_family_are_shown_beside_those_that_are_wanted(tmp_path: Path) -> None:
    def wrapped(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"base.{name}"] = tensors.pop(name)

    path = copy(LLAMA, tmp_path, wrapped)
    message = (
        r"the files hold 0 layers: nothing of model\.layers\.0\.self_attn, "
        r"but base\.model\.norm\.weight; correct model_type"
    )
    with pytest.raises(ConfigError, match=message):
        weights.check_shapes(path, models.read_spec(path))


def test_a_model_is_outlined_once_for_random_weights_and_those_that_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outline = weights.outline(models.read_spec(LLAMA), make_mesh(1), jnp.bfloat16)
    monkeypatch.setattr(build, "outline", lambda *_: pytest.fail("it is outlined again"))
    weights.load(LLAMA, outline, "dummy")
    weights.check(LLAMA, outline)
    weights.load(LLAMA, outline)


@pytest.mark.parametrize("name", golden_names())
def test_specs_made_twice_are_one_key(name: str) -> None:
    first, second = (models.read_spec(load_golden(name).directory) for _ in range(2))
    assert {first: name}[second] == name
    assert first.serving(7) != second, "another served length is another spec"


@pytest.mark.parametrize("name", golden_names())
def test_every_checkpoint_has_fitting_sizes(name: str) -> None:
    directory = load_golden(name).directory
    weights.check_shapes(directory, models.read_spec(directory))


def test_a_checkpoint_with_more_layers_or_without_numbers_has_fitting_sizes(tmp_path: Path) -> None:
    weights.check_shapes(LLAMA, models.read_spec(LLAMA).first_layers(1))
    path = copy(LLAMA, tmp_path, lambda tensors: None)
    (path / "model.safetensors").write_bytes(b"")
    weights.check_shapes(path, models.read_spec(path))  # `check` says what is wrong with the file


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.self_attn.rotary_emb.inv_freq",
        f"{LAYER}.self_attn.rotary_emb.cos_cached",
        "model.rotary_emb.inv_freq",
        f"{LAYER}.self_attn.k_scale",
        f"{LAYER}.self_attn.v_proj.v_scale",
    ],
)
def test_rotary_tables_and_scales_of_an_8_bit_cache_are_of_no_concern(
    tmp_path: Path, name: str
) -> None:
    path = copy(
        LLAMA,
        tmp_path,
        lambda tensors: tensors.update({name: np.zeros(2, np.float32)}),
    )
    assert load(path).keys() == load(LLAMA).keys()


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_model_may_store_its_head_when_it_equals_the_embedding(
    tmp_path: Path, equal: bool
) -> None:
    def add_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0 if equal else 1)

    path = copy(TIED, tmp_path, add_head)
    if equal:
        assert "head.weight.value" not in load(path)
    else:
        with pytest.raises(
            ConfigError,
            match=r"lm_head\.weight differs from model\.embed_tokens\.weight "
            "although tie_word_embeddings",
        ):
            load(path)


def test_progress_ends_at_the_total() -> None:
    seen: list[tuple[int, int]] = []
    spec = models.read_spec(LLAMA)
    _, state = weights.load(
        LLAMA,
        weights.outline(spec, make_mesh(1), jnp.float32),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1] == (sum(a.nbytes for a in jax.tree.leaves(state)),) * 2


def test_an_unknown_load_format_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="load_format 'pt' is not supported; choose one of auto, safetensors, dummy",
    ):
        load(LLAMA, load_format="pt")


def test_dummy_weights_are_random_finite_and_the_same_on_any_number_of_shards() -> None:
    one, eight = load(LLAMA, 1, load_format="dummy"), load(LLAMA, 8, load_format="dummy")
    for array in one.values():
        values = np.asarray(array)
        assert np.isfinite(values).all()
        assert np.unique(values).size > values.size // 2
    np.testing.assert_array_equal(
        one["layers.0.attention.out.weight.value"], eight["layers.0.attention.out.weight.value"]
    )
    key = np.asarray(eight["layers.0.attention.qkv.weight.value"])[:, 1]
    np.testing.assert_array_equal(key[0], key[3])
    np.testing.assert_array_equal(
        key[0], np.asarray(one["layers.0.attention.qkv.weight.value"])[0, 8]
    )
    assert not np.array_equal(
        one["layers.0.mlp.down.weight.value"], one["layers.1.mlp.down.weight.value"]
    )


def test_dummy_weights_follow_the_seed() -> None:
    spec, mesh = models.read_spec(LLAMA), make_mesh(1)
    first, again, other = (
        jax.tree.leaves(
            weights.load("", weights.outline(spec, mesh, jnp.float32), "dummy", seed=s)[1]
        )[0]
        for s in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("requested", "stored", "platform", "expected"),
    [
        ("auto", "bfloat16", "cpu", "float32"),
        ("auto", "float16", "gpu", "float16"),
        ("auto", "float32", "gpu", "bfloat16"),
        ("auto", "bfloat16", "tpu", "bfloat16"),
        ("auto", None, "gpu", "bfloat16"),
        ("half", None, "cpu", "float16"),
        ("float", "bfloat16", "gpu", "float32"),
        ("bfloat16", None, "cpu", "bfloat16"),
    ],
)
def test_dtypes_resolve(requested: str, stored: str | None, platform: str, expected: str) -> None:
    assert weights.resolve_dtype(requested, stored, platform) == jnp.dtype(expected)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype 'int8' is not supported"):
        weights.resolve_dtype("int8", None, "cpu")
