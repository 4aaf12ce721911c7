"""Parameters that go through pinned buffers are those that are placed as they are."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxllm import models, weights
from jaxllm.config import ConfigError
from jaxllm.mesh import PINNED, make_mesh
from jaxllm.weights import GivenArrays, Loader, fill, mapped, staging
from jaxllm.weights.staging import CHUNKS, Buffer, cut
from tests.goldens.golden import golden_names, load_golden
from tests.weights.test_load import LLAMA, copy
from tests.weights.test_rounding import online

load_module = importlib.import_module("jaxllm.weights.load")  # `weights.load` is the function
BUFFER = 2**12  # bytes, of which a fused part of the small models takes several
QUICK = {"llama-gqa", "llama-mqa-tied-linear"}


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter goes through buffers, and most take several."""
    monkeypatch.setattr(fill, "SMALL_BYTES", 0)
    for module in (fill, staging):
        monkeypatch.setattr(module, "BUFFER_BYTES", BUFFER)


def load(
    directory: Path,
    wish: str | None = None,
    shards: int = 1,
    before: Sequence[jax.Array] = (),
    loader: Loader | None = None,
) -> list[jax.Array]:
    spec = online(directory, wish) if wish else models.read_spec(directory)
    _, state = weights.load(
        directory,
        weights.outline(spec, make_mesh(shards), jnp.bfloat16),
        before=before,
        loader=loader,
    )
    return jax.tree.leaves(state)


def equal(one: list[jax.Array], other: list[jax.Array]) -> bool:
    return all(
        a.dtype == b.dtype
        and a.sharding == b.sharding
        and all(
            np.array_equal(_bytes(x.data), _bytes(y.data))
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True)
        )
        for a, b in zip(one, other, strict=True)
    )


def _bytes(array: jax.Array) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in golden_names()],
)
def test_every_checkpoint_goes_through_buffers_unchanged(
    name: str, shards: int, request: pytest.FixtureRequest
) -> None:
    directory = load_golden(name).directory
    try:
        expected = load(directory, shards=shards)
    except ConfigError:
        pytest.skip("its parts cannot be divided")
    request.getfixturevalue("chunked")
    assert equal(load(directory, shards=shards), expected)


@pytest.mark.parametrize(
    ("wish", "shards"),
    [(None, 1), (None, 2), ("fp8", 1), pytest.param("int4", 2, marks=pytest.mark.slow)],
)
def test_weights_are_overwritten_where_they_lie_and_nothing_is_compiled(
    wish: str | None,
    shards: int,
    tmp_path: Path,
    chunked: None,
) -> None:
    def negate(tensors: dict[str, np.ndarray]) -> None:
        tensors.update({name: -value for name, value in tensors.items()})

    other = copy(LLAMA, tmp_path, negate)
    loader = Loader()
    expected = load(other, wish, shards, loader=loader)
    before = load(LLAMA, wish, shards, loader=loader)
    places = [_places(array) for array in before]
    compiled = loader.writer.cache_info().misses
    assert compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffer, "__init__", lambda *_: pytest.fail("a buffer was made"))
        found = load(other, wish, shards, before, loader)
    assert equal(found, expected) and not equal(found, load(LLAMA, wish, shards))
    assert [_places(array) for array in found] == places
    assert all(array.is_deleted() for array in before)
    assert loader.writer.cache_info().misses == compiled


def _places(array: jax.Array) -> list[int]:
    return [part.data.unsafe_buffer_pointer() for part in array.addressable_shards]


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize(
    "shape", [(1,), (5000,), (3, 7, 11), (1, 2, 100, 96), (4097, 1), (2, 1, 3, 1024, 5), (64, 4096)]
)
def test_blocks_cover_an_array_and_each_fits_a_buffer(
    shape: tuple[int, ...], itemsize: int, chunked: None
) -> None:
    numbers = np.arange(np.prod(shape)).reshape(shape)
    seen, shapes = np.zeros(numbers.size, bool), set()
    for start, block in cut(shape, itemsize):
        own = numbers[tuple(slice(at, at + n) for at, n in zip(start, block, strict=True))]
        assert own.shape == block and own.size * itemsize <= BUFFER // CHUNKS
        assert own[..., -1].ravel()[-1] - own.ravel()[0] == own.size - 1, "lies in one piece"
        seen[own.ravel()] = True
        shapes.add(block)
    assert seen.all() and len(shapes) == 1


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_a_load_takes_no_more_pinned_memory_than_its_buffers(
    shards: int, chunked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[jax.Device] = []
    sent: list[int] = []
    real_made, real_sent = Buffer.__init__, Buffer.send

    def make(self: Buffer, device: jax.Device) -> None:
        real_made(self, device)
        made.append(device)
        assert self._array.sharding.memory_kind == PINNED

    def send(self: Buffer) -> jax.Array:
        sent.append(self._array.nbytes)
        return real_sent(self)

    monkeypatch.setattr(staging, "readers", lambda: 4)
    monkeypatch.setattr(Buffer, "__init__", make)
    monkeypatch.setattr(Buffer, "send", send)
    loader = Loader()
    leaves = load(LLAMA, shards=shards, loader=loader)
    own = {device: made.count(device) for device in made}
    assert set(own.values()) == {{1: 6, 2: 6, 8: 3}[shards]}
    assert sum(sent) >= sum(part.data.nbytes for x in leaves for part in x.addressable_shards)
    load(LLAMA, shards=shards, loader=loader)
    assert len(made) == sum(own.values()), "a second load makes none"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_whole_tensor_is_read_from_its_file_and_never_mapped_into_memory(
    dtype: Any, chunked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = mapped.read

    def noting(view: np.ndarray, target: np.ndarray) -> bool:
        done = real(view, target)
        read.append(target.nbytes if done else 0)
        return done

    monkeypatch.setattr(mapped, "read", noting)
    _, state = weights.load(LLAMA, weights.outline(models.read_spec(LLAMA), make_mesh(1), dtype))
    assert 0 not in read
    whole = sum(array.size for array in jax.tree.leaves(state)) * np.dtype(np.float32).itemsize
    assert sum(read) >= whole


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_file_that_is_cut_while_it_is_read_is_an_error_in_one_line(
    dtype: Any, tmp_path: Path, chunked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = copy(LLAMA, tmp_path, lambda tensors: None)
    file = directory / "model.safetensors"
    real = load_module.fill

    def shorten(*given: Any) -> Any:
        os.truncate(file, file.stat().st_size // 2)
        return real(*given)

    monkeypatch.setattr(load_module, "fill", shorten)
    spec = models.read_spec(directory)
    with pytest.raises(ConfigError, match=r"cannot be read: model\.safetensors ended at byte \d+"):
        weights.load(directory, weights.outline(spec, make_mesh(1), dtype))


@pytest.mark.parametrize("shards", [1, 2])
def test_readers_send_their_buffers_and_a_write_brings_nothing_along(
    shards: int, chunked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders: set[str] = set()
    real_send, real_write = Buffer.send, fill.Target.write

    def send(buffer: Buffer) -> jax.Array:
        senders.add(threading.current_thread().name.rpartition("_")[0])
        return real_send(buffer)

    def write(*given: Any) -> bool:
        with jax.transfer_guard("disallow"):
            return real_write(*given)

    monkeypatch.setattr(Buffer, "send", send)
    monkeypatch.setattr(fill.Target, "write", write)
    load(LLAMA, shards=shards)
    assert senders == {"weights"}


def test_a_buffer_takes_no_more_blocks_than_it_has_slots(
    chunked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, most = load(LLAMA), list[int]()
    real = fill.Batch.write

    def write(batch: fill.Batch, *given: Any) -> Any:
        most.append(len(batch.chunks))
        return real(batch, *given)

    monkeypatch.setattr(fill.Batch, "write", write)
    for slots, wanted in ((32, 4), (2, 2)):
        for module in (fill, staging):
            monkeypatch.setattr(module, "SLOTS", slots)
        most.clear()
        assert equal(load(LLAMA), expected)
        assert max(most) == wanted


def test_buffers_of_a_load_that_fails_serve_the_next_one(
    chunked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, made = Loader(), list[Buffer]()
    make = Buffer.__init__

    def counted(buffer: Buffer, device: jax.Device) -> None:
        made.append(buffer)
        make(buffer, device)

    monkeypatch.setattr(Buffer, "__init__", counted)
    expected = load(LLAMA, loader=loader)
    count = len(made)
    with monkeypatch.context() as patch:
        patch.setattr(fill, "read_block", lambda *_: (_ for _ in ()).throw(ConfigError("gone")))
        with pytest.raises(ConfigError, match="gone"):
            load(LLAMA, loader=loader)
    assert equal(load(LLAMA, loader=loader), expected)
    assert len(made) == count > 0


@pytest.mark.parametrize("wish", ["int4", "fp8"])
def test_what_is_kept_goes_through_buffers_too(wish: str, tmp_path: Path, chunked: None) -> None:
    spec, mesh, cache = online(LLAMA, wish), make_mesh(2), tmp_path / "cache"

    def leaves() -> list[jax.Array]:
        return jax.tree.leaves(
            weights.load(LLAMA, weights.outline(spec, mesh, jnp.bfloat16), cache=cache)[1]
        )

    made, found = leaves(), leaves()
    assert equal(found, made)


@pytest.mark.parametrize(("wish", "shards"), [(None, 1), (None, 2), ("fp8", 1)])
@pytest.mark.parametrize("form", ["numpy", "jax", "pairs"])
def test_arrays_are_taken_as_a_checkpoint_is(
    wish: str | None, shards: int, form: str, chunked: None
) -> None:
    tensors: Any = load_file(LLAMA / "model.safetensors")
    if form == "jax":
        tensors = {name: jnp.asarray(tensor) for name, tensor in tensors.items()}
    given = GivenArrays(iter(tensors.items()) if form == "pairs" else tensors)
    spec = online(LLAMA, wish) if wish else models.read_spec(LLAMA)
    weights.check(given, weights.outline(spec, make_mesh(shards), jnp.bfloat16))
    _, state = weights.load(given, weights.outline(spec, make_mesh(shards), jnp.bfloat16))
    assert equal(jax.tree.leaves(state), load(LLAMA, wish, shards))


def test_arrays_that_do_not_fit_are_named_in_one_error() -> None:
    tensors: dict[str, Any] = dict(load_file(LLAMA / "model.safetensors"))
    layer = "model.layers.0"
    del tensors["lm_head.weight"]
    tensors["model.norm.weight"] = np.ones(31, np.float32)
    tensors[f"{layer}.mlp.up_proj.weight"] = np.zeros((48, 32), np.int16)
    tensors[f"{layer}.mlp.down_proj.weight"] = [[1.0]]
    tensors["model.extra"] = np.zeros(2, np.float32)
    pairs = [*tensors.items(), ("model.embed_tokens.weight", np.zeros((96, 32)))]
    spec = models.read_spec(LLAMA)
    with pytest.raises(ConfigError) as error:
        weights.check(GivenArrays(pairs), weights.outline(spec, make_mesh(1), jnp.bfloat16))
    text = str(error.value)
    assert text.startswith("the arrays given do not fit the model: ") and "\n" not in text
    for part in (
        "missing lm_head.weight",
        "model.norm.weight has shape [31], expected [32]",
        f"{layer}.mlp.up_proj.weight has dtype int16, which is not one of",
        f"{layer}.mlp.down_proj.weight is a list, not an array of NumPy or JAX",
        "unexpected model.extra",
        "model.embed_tokens.weight is given twice",
    ):
        assert part in text
    assert f"missing {layer}.mlp.down_proj.weight" not in text


@pytest.mark.usefixtures("chunked")
def test_fewer_buffers_than_wanted_serve_a_load_and_none_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = load(LLAMA)
    left = [1]

    def pinned(buffer: Buffer, device: jax.Device) -> None:
        if not left[0]:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: cannot pin")
        left[0] -= 1
        make(buffer, device)

    make = Buffer.__init__
    monkeypatch.setattr(Buffer, "__init__", pinned)
    for few in (1, 0):
        left[0] = few
        if few:
            assert equal(load(LLAMA), wanted)
        else:
            with pytest.raises(ConfigError, match=r"pinned, .* are needed: free some"):
                load(LLAMA)
