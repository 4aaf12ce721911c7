"""Weights that are kept as devices hold them: read alone by the next start, and never trusted."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import cli, models, weights
from jaxllm.mesh import WHOLE, Stage, make_mesh, stages
from jaxllm.weights import kept, reader
from jaxllm.weights.rounding import Rounding
from tests.weights.test_rounding import LLAMA, online


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(LLAMA, tmp_path / "model")


def load(
    model: Path,
    cache: Path,
    wish: str = "int4",
    shards: int = 1,
    dtype: Any = jnp.bfloat16,
    stage: Stage = WHOLE,
):
    spec = online(model, wish)
    _, state = weights.load(
        model, weights.outline(spec, make_mesh(shards), dtype, stage), cache=cache
    )
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if not path.name.startswith(".")]


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function after which no tensor of a checkpoint can be read, but for entries."""

    def begin(model: Path) -> None:
        real = reader.Checkpoint.view

        def view(self: reader.Checkpoint, name: str) -> Any:
            assert self.directory != model, f"{name} was read"
            return real(self, name)

        monkeypatch.setattr(reader.Checkpoint, "view", view)

    return begin


@pytest.mark.parametrize(
    ("wish", "shards"), [("int4", 1), pytest.param("fp8", 2, marks=pytest.mark.slow)]
)
def test_a_second_start_reads_what_is_kept_alone(
    model: Path, tmp_path: Path, unread: Any, wish: str, shards: int
) -> None:
    cache = tmp_path / "cache"
    first = load(model, cache, wish, shards)
    (entry,) = entries(cache)
    unread(model)
    assert equal(first, load(model, cache, wish, shards))
    assert entries(cache) == [entry]


def test_each_stage_of_a_pipeline_reads_what_is_kept_of_it_alone(
    model: Path, tmp_path: Path, unread: Any
) -> None:
    cache, each = tmp_path / "cache", [WHOLE, *stages(2)]
    first = [load(model, cache, stage=stage) for stage in each]
    assert len(entries(cache)) == len(each)
    unread(model)
    for stage, found in zip(each, first, strict=True):
        assert equal(found, load(model, cache, stage=stage))


def test_what_weights_depend_on_makes_other_entries(model: Path, tmp_path: Path) -> None:
    cache, mesh = tmp_path / "cache", make_mesh(1)

    def name(wish: str, dtype: Any = jnp.bfloat16, shards: int = 1) -> str:
        entry = weights.kept_entry(
            model, weights.outline(online(model, wish), make_mesh(shards), dtype), cache
        )
        assert entry is not None
        return entry.folder.name

    names = [name("int4"), name("fp8"), name("int4", jnp.float16), name("int4", shards=2)]
    file = model / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    names.append(name("int4"))
    assert len(set(names)) == 5 and name("int4") == names[-1]
    assert (
        weights.kept_entry(
            model, weights.outline(models.read_spec(model), mesh, jnp.bfloat16), cache
        )
        is None
    )


@pytest.mark.parametrize("damage", ["flipped", "cut", "no sums", "unfinished"])
def test_an_entry_that_is_not_whole_is_made_anew(
    model: Path, tmp_path: Path, unread: Any, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    cache = tmp_path / "cache"
    first = load(model, cache)
    (entry,) = entries(cache)
    file = entry / kept.FILE
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[-100] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-8])
    elif damage == "no sums":
        (entry / kept.SUMS).unlink()
    else:  # killed while it was written
        file.write_bytes(content[:1000])
        entry.rename(cache / f".{entry.name}.unfinished")
    with caplog.at_level("WARNING", "jaxllm"):
        assert equal(first, load(model, cache))
    assert ("are damaged; they are made anew" in caplog.text) == (damage != "unfinished")
    assert not list(cache.glob(".*.unfinished"))
    unread(model)
    assert equal(first, load(model, cache))


def test_nothing_of_a_damaged_entry_is_left_when_room_is_made(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices have no room for weights twice."""
    cache, alive = tmp_path / "cache", []
    load(model, cache)
    file = entries(cache)[0] / kept.FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    real, before = Rounding.take_room, len(jax.live_arrays())

    def take_room(self: Rounding, rules: Any) -> None:
        alive.append(len(jax.live_arrays()) - before)
        real(self, rules)

    monkeypatch.setattr(Rounding, "take_room", take_room)
    load(model, cache)
    assert alive == [0]


@pytest.mark.parametrize("full", ["beforehand", "meanwhile"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    full: str,
) -> None:
    cache = tmp_path / "cache"
    if full == "beforehand":
        usage = type("Usage", (), {"free": 1000})
        monkeypatch.setattr(kept.shutil, "disk_usage", lambda path: usage)
    else:

        def fsync(number: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(kept.os, "fsync", fsync)
    with caplog.at_level("WARNING", "jaxllm"):
        assert load(model, cache)
    (line,) = caplog.messages
    assert line.startswith(f"cannot keep weights in {cache}: ") and "\n" not in line
    assert ("No space left" in line) == (full == "meanwhile")
    assert not entries(cache) and not list(cache.glob(".*.unfinished"))


@pytest.mark.slow
def test_convert_writes_the_weights_of_each_stage(
    model: Path, tmp_path: Path, unread: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    options = ["--quantization", "int4", "--dtype", "float32", "-pp", "2"]
    assert cli.main(["convert", str(model), str(cache), "--as-served", *options]) == 0
    said = capsys.readouterr().out
    assert len(entries(cache)) == 2 and all(str(entry) in said for entry in entries(cache))
    unread(model)
    for stage in stages(2):
        assert load(model, cache, dtype=jnp.float32, stage=stage)


@pytest.mark.slow
def test_convert_writes_what_a_start_with_these_options_reads(
    model: Path, tmp_path: Path, unread: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    options = ["--quantization", "int4", "--dtype", "float32"]
    assert cli.main(["convert", str(model), str(cache), "--as-served", *options]) == 0
    (entry,) = entries(cache)
    assert str(entry) in capsys.readouterr().out
    unread(model)
    assert load(model, cache, dtype=jnp.float32)
    assert cli.main(["convert", str(model), str(cache), "--as-served"]) == 1
    assert "weights of 16 bits are served as they are" in capsys.readouterr().err
    assert cli.main(["convert", "--as-served"]) == 2
