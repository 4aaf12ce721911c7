"""Lowered programs between runs: StableHLO on disk, so that a second start lowers nothing.

XLA's persistent cache is keyed by a program's lowered form. Lowering a model with its kernels takes
Python a second a program; reading a kept one takes a twentieth of that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxllm.engine.runtime.compilation.traces import forget

HISTORY = (
    16  # sets of programs (one a configuration and version of the code); the oldest are removed
)
_DIGEST = hashlib.sha256().digest_size
_ROOT = Path(__file__).parents[4]
_RUNTIME = "jaxllm/engine/runtime"
# Folders and files whose code runs while a program is traced, or that size its arguments
SOURCES = (
    "pallas_kernels",
    "jaxllm/cache",
    "jaxllm/models",
    "jaxllm/nn",
    "jaxllm/sampling",
    "jaxllm/weights",
    "jaxllm/mesh.py",
    "jaxllm/engine/scheduling/buckets.py",
    f"{_RUNTIME}/programs",
    f"{_RUNTIME}/packing.py",
    f"{_RUNTIME}/program.py",
    f"{_RUNTIME}/shapes.py",
    f"{_RUNTIME}/state.py",
    f"{_RUNTIME}/compilation/executables.py",
    f"{_RUNTIME}/compilation/exports.py",
)
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
_KERNELS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2")
)


def fingerprint(facts: dict[str, Any], root: Path = _ROOT) -> str:
    """Key of the programs of one configuration: equal keys mean equal lowered programs.

    It covers the code of `SOURCES` under `root`, JAX, and `facts` (JSON) about model, engine and
    device.
    """
    digest = hashlib.sha256()
    for name in SOURCES:
        source = root / name
        if source.is_dir():
            found = sorted(source.rglob("*"))
        else:
            found = [source]
        for path in (p for p in found if p.suffix in (".py", ".json")):
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    versions = [version(name) for name in ("jax", "jaxlib", "flax", "numpy")]
    digest.update(json.dumps([versions, settings(), facts], sort_keys=True, default=str).encode())
    return digest.hexdigest()[:32]


def settings() -> dict[str, Any]:
    """JAX's settings that change what a program computes."""
    return {name: getattr(jax.config, name) for name in _SETTINGS}


class Exports:
    """The lowered programs and figures of one configuration, in a folder that only its owner can
    reach.

    A file that is missing, damaged or of another kind reads as None. A file that cannot be written
    is not kept.
    """

    def __init__(self, root: Path, key: str):
        self.folder = root / key
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The folder may be read-only, or another process prunes
        with contextlib.suppress(OSError):
            os.utime(self.folder)
            _prune(root)

    @classmethod
    def open(cls, root: Path, key: str) -> Exports | None:
        """The folder of a key, or None where it cannot be made or others could write to it."""
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            if is_private(root):
                return cls(root, key)
            return None
        except OSError:
            return None

    def has(self, name: str) -> bool:
        """Whether there is a file for a lowered program, whole or not."""
        return (self.folder / f"{name}.stablehlo").is_file()

    def load(self, name: str) -> jax.export.Exported | None:
        """A lowered program."""
        found = self._read(f"{name}.stablehlo")
        try:
            if found is None:
                return None
            return jax.export.deserialize(bytearray(found))
        except Exception:  # whatever the reader raises on such bytes: the program is made anew
            return None

    def save(self, name: str, program: jax.export.Exported) -> None:
        """Keep a lowered program. Raises JAX's error if it cannot be serialised."""
        self._write(f"{name}.stablehlo", bytes(program.serialize()))

    def figures(self) -> dict[str, int]:
        """Numbers kept by `keep_figures`; empty when there are none."""
        try:
            found = json.loads(self._read("figures.json") or b"{}")
        except ValueError:
            return {}
        if isinstance(found, dict):
            return {k: v for k, v in found.items() if type(v) is int}
        return {}

    def keep_figures(self, figures: dict[str, int]) -> None:
        """Keep numbers for the next start."""
        self._write("figures.json", json.dumps(figures).encode())

    def _read(self, name: str) -> bytes | None:
        try:
            found = (self.folder / name).read_bytes()
        except OSError:
            return None
        body = found[_DIGEST:]
        if hashlib.sha256(body).digest() == found[:_DIGEST]:
            return body
        return None

    def _write(self, name: str, body: bytes) -> None:
        """Write a file whole or not at all: another process may read it."""
        path = self.folder / f".{name}.{os.getpid()}"
        try:
            path.write_bytes(hashlib.sha256(body).digest() + body)
            path.replace(self.folder / name)
        except OSError:
            # A read-only file system refuses even to remove a missing file
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def is_private(folder: Path) -> bool:
    """Whether a folder belongs to this user or root, and no other user may write to it: its files
    are run."""
    found = folder.stat()
    return found.st_uid in (os.getuid(), 0) and not found.st_mode & 0o022


def export(function: Callable, arguments: tuple, platform: str) -> jax.export.Exported:
    """`function(*arguments)` lowered, from the flat list of argument leaves to the flat list of
    result leaves.

    `arguments` are shapes with shardings. The caller sets donation and the results' shardings.
    """
    leaves, tree = jax.tree.flatten(arguments)

    def flat(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves))))

    name = {"gpu": "cuda"}.get(platform, platform)
    jitted = jax.jit(flat, keep_unused=True)
    traced = jitted.trace(*leaves)  # which the export finds
    exported = jax.export.export(jitted, platforms=(name,), disabled_checks=_KERNELS)(*leaves)
    forget(traced)
    return exported


def calling(name: str, program: jax.export.Exported, out: Any) -> Callable:
    """A function with the arguments of the exported one; `out` has the structure of its results.
    Profiles show `name`."""
    tree = jax.tree.structure(out)

    def call(*arguments: Any) -> Any:
        return jax.tree.unflatten(tree, program.call(*jax.tree.leaves(arguments)))

    call.__name__ = name.replace("-", "_")
    return call


def _prune(root: Path) -> None:
    folders = sorted(
        (path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime
    )
    for folder in folders[:-HISTORY]:
        shutil.rmtree(folder, ignore_errors=True)
