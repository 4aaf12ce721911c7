"""Lowered programs between runs: the same program, at a fraction of the host's work, and nothing
worse than time lost."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime.compilation import exports
from jaxllm.engine.runtime.compilation.executables import Executables, Recipe
from jaxllm.engine.runtime.compilation.exports import Exports, fingerprint
from jaxllm.engine.runtime.compilation.xla_options import XlaOptions
from jaxllm.mesh import make_mesh

REPO = Path(__file__).parents[4]


class Traced:
    """A function of a dict and an array that counts how often it is traced."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self, state: dict[str, jax.Array], x_TD: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        self.count += 1
        return {"kv": state["kv"].at[3].set(x_TD[0])}, jnp.tanh(x_TD @ x_TD.T)


def recipe(function: Callable, devices: int = 1) -> Recipe:
    mesh = make_mesh(devices)
    split, whole = (
        NamedSharding(mesh, PartitionSpec(None, "tensor")),
        NamedSharding(mesh, PartitionSpec()),
    )
    state = {"kv": jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=split)}
    x_TD = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=whole)
    return Recipe(function, (state, x_TD), (0,), ({"kv": split}, whole))


def build(folder: Path | None, made: Recipe, name: str = "decode-8") -> jax.stages.Compiled:
    kept = None if folder is None else Exports.open(folder, "key")
    return Executables(XlaOptions(), kept, "cpu").compile(name, 8, made, keep=True)


def run(program: jax.stages.Compiled, made: Recipe) -> tuple[jax.Array, Any]:
    (state, x_TD) = jax.tree.map(
        lambda s: jax.device_put(np.ones(s.shape, s.dtype) * 0.1, s.sharding), made.arguments
    )
    return state["kv"], program(state, x_TD)


def opcodes(program: jax.stages.Compiled) -> list[str]:
    """The compiled instructions in order, without their names."""
    return re.findall(r"= \S+ ([\w-]+)\(", program.as_text() or "")


@pytest.mark.parametrize("devices", [1, 4])
def test_a_second_start_traces_nothing_and_runs_the_same_program_in_place(
    tmp_path: Path, devices: int
) -> None:
    function = Traced()
    first = build(tmp_path, recipe(function, devices))
    assert function.count == 1
    second = build(tmp_path, recipe(function, devices))
    assert function.count == 1
    direct = build(None, recipe(function, devices))
    given, (state, out) = run(second, recipe(function, devices))
    assert given.is_deleted()
    for other in (first, direct):
        _, expected = run(other, recipe(function, devices))
        jax.tree.map(np.testing.assert_array_equal, (state, out), expected)
        assert (
            second.memory_analysis().alias_size_in_bytes
            == other.memory_analysis().alias_size_in_bytes
            > 0
        )
        # Several: the partitioner takes calls into account, and names the same program otherwise
        if devices == 1:
            assert opcodes(second) == opcodes(other)
            assert (
                second.memory_analysis().temp_size_in_bytes
                == other.memory_analysis().temp_size_in_bytes
            )
        assert jax.tree.map(
            lambda x, y: x.is_equivalent_to(y, 2), second.output_shardings, other.output_shardings
        ) == ({"kv": True}, True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b[:-1] + bytes([b[-1] ^ 1]),
        lambda b: b"",
        lambda b: b"stranger" * 99,
    ],
)
def test_a_damaged_file_only_costs_time(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    function = Traced()
    build(tmp_path, recipe(function))
    (path,) = tmp_path.rglob("*.stablehlo")
    path.write_bytes(damage(path.read_bytes()))
    run(build(tmp_path, recipe(function)), recipe(function))
    assert function.count == 2
    build(tmp_path, recipe(function))
    assert function.count == 2, "what was damaged is replaced"


def test_a_whole_file_that_is_no_program_only_costs_time(tmp_path: Path) -> None:
    kept = Exports.open(tmp_path, "key")
    assert kept is not None
    kept._write("decode-8.stablehlo", b"not a program")
    assert kept.load("decode-8") is None


def test_a_program_that_cannot_be_kept_is_compiled_all_the_same(tmp_path: Path) -> None:
    def noisy(state: dict, x_TD: jax.Array) -> tuple[dict, jax.Array]:
        jax.debug.callback(lambda x: None, x_TD[0, 0])
        return state, x_TD @ x_TD.T

    assert run(build(tmp_path, recipe(noisy)), recipe(noisy))
    assert not list(tmp_path.rglob("*.stablehlo"))


def test_a_folder_that_others_may_write_to_is_not_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert Exports.open(tmp_path, "key") is None
    tmp_path.chmod(0o700)
    assert Exports.open(tmp_path, "key") is not None


@pytest.mark.parametrize(
    ("owner", "mode", "private"),
    [(7, 0o40700, True), (0, 0o40755, True), (8, 0o40700, False), (7, 0o40770, False)],
)
def test_only_a_folder_of_this_user_or_root_is_trusted(
    owner: int, mode: int, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports.os, "getuid", lambda: 7)
    folder = SimpleNamespace(stat=lambda: SimpleNamespace(st_uid=owner, st_mode=mode))
    assert exports.is_private(cast(Path, folder)) == private


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert Exports.open(tmp_path / "file" / "programs", "key") is None


def test_what_is_kept_on_a_read_only_file_system_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Exports.open(tmp_path, "key")
    assert first is not None
    first.keep_figures({"peak": 1})

    def refused(path: object, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    for owner, name in ((os, "utime"), (Path, "write_bytes"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, refused)
    later = Exports.open(tmp_path, "key")
    assert later is not None and later.figures() == {"peak": 1}
    later.keep_figures({"peak": 2})
    assert later.figures() == {"peak": 1}


def test_only_the_newest_sets_of_programs_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "HISTORY", 2)
    for age, key in ((300, "a"), (200, "b"), (100, "c")):
        kept = Exports.open(tmp_path, key)
        assert kept is not None
        kept.keep_figures({"n": age})
        os.utime(tmp_path / key, (10**9 - age, 10**9 - age))
    Exports.open(tmp_path, "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]


def test_figures_come_back_and_nonsense_does_not(tmp_path: Path) -> None:
    kept = Exports.open(tmp_path, "key")
    assert kept is not None
    assert kept.figures() == {}
    kept.keep_figures({"peak": 2**40})
    assert kept.figures() == {"peak": 2**40}
    for nonsense in (b"[1]", b"{", b'{"peak": "much"}'):
        kept._write("figures.json", nonsense)
        assert kept.figures() == {}


def test_a_fingerprint_changes_with_any_fact_and_setting_and_not_by_itself() -> None:
    facts = {"model": {"hidden_size": 8}, "pages": 16}
    assert fingerprint(facts) == fingerprint(dict(reversed(facts.items())))
    assert fingerprint(facts) != fingerprint(facts | {"pages": 17})


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages' sources."""
    root = tmp_path_factory.mktemp("sources")
    for package in ("jaxllm", "pallas_kernels"):
        shutil.copytree(
            REPO / package, root / package, ignore=shutil.ignore_patterns("__pycache__", "demo")
        )
    return root


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("jaxllm/server/app.py", False),
        ("jaxllm/grammar/matcher.py", False),
        ("jaxllm/engine/engine.py", False),
        ("jaxllm/engine/scheduling/scheduler.py", False),
        ("jaxllm/engine/runtime/runner.py", False),
        ("pallas_kernels/paged_decode/mosaic_gpu.py", True),
        ("jaxllm/models/llama.py", True),
        ("jaxllm/nn/decoder.py", True),
        ("jaxllm/cache/kv.py", True),
        ("jaxllm/sampling/sample.py", True),
        ("jaxllm/engine/runtime/programs/forward.py", True),
        ("jaxllm/engine/runtime/state.py", True),
        ("jaxllm/engine/scheduling/buckets.py", True),
    ],
)
def test_only_code_that_can_change_a_program_changes_its_key(
    path: str, changes: bool, tree: Path
) -> None:
    before, text = fingerprint({}, tree), (tree / path).read_text()
    assert before == fingerprint({}), "a copy of the code has the same key"
    (tree / path).write_text(text + "# another version\n")
    changed = fingerprint({}, tree) != before
    (tree / path).write_text(text)
    assert changed == changes


def test_every_file_that_runs_while_a_program_is_traced_is_in_its_key(
    make_engine: Callable[..., Engine],
) -> None:
    programs = make_engine(max_logprobs=5).runner.programs
    files: set[str] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    jax.clear_caches()
    for key in {key.program: key for key in programs.lattice}.values():
        made = programs.recipe(key)
        sys.setprofile(note)
        try:
            jax.jit(made.function).trace(*made.arguments)
        finally:
            sys.setprofile(None)
    packages = f"{REPO}/jaxllm/", f"{REPO}/pallas_kernels/"
    traced = {name.removeprefix(f"{REPO}/") for name in files if name.startswith(packages)}
    assert "jaxllm/engine/runtime/programs/forward.py" in traced
    hashed = tuple(name if name.endswith(".py") else f"{name}/" for name in exports.SOURCES)
    # It hears of compilations only
    traced.discard("jaxllm/engine/runtime/compilation/compile_counter.py")
    assert {path for path in traced if not path.startswith(hashed)} == set()


def test_every_hashed_source_exists() -> None:
    assert all((REPO / name).exists() for name in exports.SOURCES)
