"""Lowered programs between runs: StableHLO on disk, so that a second start traces and lowers
nothing.

XLA's persistent cache is found by a program's lowered form. Lowering a model with its kernels takes
Python a second a program; reading what was lowered before takes a twentieth of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

HISTORY = (
    16  # sets of programs (one a configuration and version of the code); the oldest are removed
)
_DIGEST = hashlib.sha256().digest_size
_SOURCES = ("jaxllm", "pallas_kernels")
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
_KERNELS = tuple(
    jax.export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2")
)


def fingerprint(facts: dict[str, Any]) -> str:
    """What must be equal for a lowered program to be the same: this code, JAX, and `facts` (JSON)
    about model, engine and device."""
    digest = hashlib.sha256()
    for package in _SOURCES:
        spec = find_spec(package)
        assert spec is not None
        root = Path(spec.origin or "").parent
        for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".json")):
            digest.update(
                f"{path.relative_to(root)}\0".encode() + hashlib.sha256(path.read_bytes()).digest()
            )
    versions = [version(name) for name in ("jax", "jaxlib", "flax", "numpy")]
    digest.update(json.dumps([versions, settings(), facts], sort_keys=True, default=str).encode())
    return digest.hexdigest()[:32]


def settings() -> dict[str, Any]:
    """JAX's settings that change what a program computes."""
    return {name: getattr(jax.config, name) for name in _SETTINGS}


class Exports:
    """The lowered programs and the figures of one configuration, in a folder that only its owner
    can reach.

    A file that is missing, damaged or of something else reads as None. What cannot be written is
    not kept.
    """

    def __init__(self, root: Path, key: str):
        self.folder = root / key
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Nothing can be written here, but read; or another process prunes
        with contextlib.suppress(OSError):
            os.utime(self.folder)
            _prune(root)

    @classmethod
    def open(cls, root: Path, key: str) -> Exports | None:
        """The folder of a key, or None where it cannot be made or others could write to it."""
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            return cls(root, key) if is_private(root) else None
        except OSError:
            return None

    def has(self, name: str) -> bool:
        """Whether there is a file for a lowered program, whole or not."""
        return (self.folder / f"{name}.stablehlo").is_file()

    def load(self, name: str) -> jax.export.Exported | None:
        """A lowered program."""
        found = self._read(f"{name}.stablehlo")
        try:
            return None if found is None else jax.export.deserialize(bytearray(found))
        except (
            Exception
        ):  # whatever a reader says of bytes it does not understand: they are made anew
            return None

    def save(self, name: str, program: jax.export.Exported) -> None:
        """Keep a lowered program. Raises what JAX raises for a program that cannot be written."""
        self._write(f"{name}.stablehlo", bytes(program.serialize()))

    def figures(self) -> dict[str, int]:
        """Numbers kept by `keep_figures`; empty when there are none."""
        try:
            found = json.loads(self._read("figures.json") or b"{}")
        except ValueError:
            return {}
        return {k: v for k, v in found.items() if type(v) is int} if isinstance(found, dict) else {}

    def keep_figures(self, figures: dict[str, int]) -> None:
        """Numbers worth knowing at the next start."""
        self._write("figures.json", json.dumps(figures).encode())

    def _read(self, name: str) -> bytes | None:
        try:
            found = (self.folder / name).read_bytes()
        except OSError:
            return None
        body = found[_DIGEST:]
        return body if hashlib.sha256(body).digest() == found[:_DIGEST] else None

    def _write(self, name: str, body: bytes) -> None:
        """Whole or not at all, since another process may read it."""
        path = self.folder / f".{name}.{os.getpid()}"
        try:
            path.write_bytes(hashlib.sha256(body).digest() + body)
            path.replace(self.folder / name)
        except OSError:
            # A read-only file system says so even of what is not there
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def is_private(folder: Path) -> bool:
    """Whether a folder is this user's, or root's, and nobody else may write to it: what lies in it
    is run."""
    found = folder.stat()
    return found.st_uid in (os.getuid(), 0) and not found.st_mode & 0o022


def export(function: Callable, arguments: tuple, platform: str) -> jax.export.Exported:
    """`function(*arguments)` lowered, as a function of the flat list of leaves that gives the flat
    list of results' leaves.

    `arguments` are shapes with shardings. Donation and the shardings of results are up to whoever
    calls it.
    """
    leaves, tree = jax.tree.flatten(arguments)

    def flat(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves))))

    name = {"gpu": "cuda"}.get(platform, platform)
    return jax.export.export(
        jax.jit(flat, keep_unused=True), platforms=(name,), disabled_checks=_KERNELS
    )(*leaves)


def calling(name: str, program: jax.export.Exported, out: Any) -> Callable:
    """A function of the arguments that `program` was made of; `out` has the structure of its
    results. Profiles show `name`."""
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
