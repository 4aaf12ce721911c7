"""Weights as the devices hold them, kept in files, so that a second start reads these alone.

An entry is a folder with one safetensors file of all parameters and their check sums. It is written
under another name and renamed when it is whole. Its own name is a digest of all that the parameters
depend on, so an entry never has to be compared with anything.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.nn.rules import Piece, Rule
from jaxllm.units import amount
from jaxllm.weights import mapped
from jaxllm.weights.blocks import View
from jaxllm.weights.convert import WEIGHTS, Part, header
from jaxllm.weights.model_files import ModelFiles
from jaxllm.weights.outline import Outline
from jaxllm.weights.reader import Checkpoint
from jaxllm.weights.staging import readers
from jaxllm.weights.stored import STORED_NAMES

FORM = 1  # of entries; another number makes all entries of before unknown
READ_BYTES = 2**24
FILE = "parameters.safetensors"
SUMS = "sums.json"
logger = logging.getLogger("jaxllm")

type Likes = Mapping[str, jax.ShapeDtypeStruct]


class Damaged(Exception):
    """An entry that is not what was written."""


def digest(checkpoint: Checkpoint, scheme: object, rules: Sequence[Rule], likes: Likes) -> str:
    """A digest, 40 hexadecimal digits, of all that a kept entry depends on: the checkpoint's files
    and tensors, how parameters are made of them, and how these lie on devices."""
    assert checkpoint.directory is not None, "arrays are not kept"
    files = sorted(
        (str(path.relative_to(checkpoint.directory)), path.stat().st_size, path.stat().st_mtime_ns)
        for path in checkpoint.directory.rglob("*")
        if path.suffix in WEIGHTS and path.is_file()
    )
    tensors = sorted((name, entry.dtype, entry.shape) for name, entry in checkpoint.entries.items())
    made = [
        (name, like.shape, str(like.dtype), str(like.sharding.spec), dict(like.sharding.mesh.shape))
        for name, like in likes.items()
    ]
    sha256 = hashlib.sha256()
    for part in (FORM, repr(scheme), files, tensors, made):
        sha256.update(json.dumps(part).encode())
    for rule in rules:
        sha256.update(repr(rule).encode())
    return sha256.hexdigest()[:40]


def kept_at(cache: Path | None, checkpoint: Checkpoint, outline: Outline) -> Kept | None:
    """The entry of the outlined parameters; None without a cache, for arrays, where weights are
    plain, or lie on several hosts."""
    spec = outline.spec
    is_packed = spec.formats or spec.scheme is not None
    if cache is None or checkpoint.directory is None or not is_packed or jax.process_count() > 1:
        return None
    rules = checkpoint.stored_rules(outline.rules)  # their tensors tell a stage from another
    return Kept(cache, digest(checkpoint, spec.scheme, rules, outline.likes))


class Kept:
    """One entry of a cache of weights."""

    def __init__(self, cache: Path, name: str):
        self.folder = cache / name
        self._unfinished = cache / f".{name}.unfinished"
        self._lock = cache / f".{name}.lock"

    def read(self, likes: Likes, stack: ExitStack) -> tuple[list[Rule], View] | None:
        """How to fill parameters with the entry, which is open as long as the `stack`; None where
        there is none, or it is damaged."""
        if not self.folder.is_dir():
            return None
        try:
            stored = self._verified(likes, stack.enter_context(ModelFiles(self.folder)))
        except Damaged:
            logger.warning("kept weights in %s are damaged; they are made anew", self.folder)
            return None
        logger.info("weights are those kept in %s; the checkpoint is not read", self.folder)
        shapes = {name: like.shape for name, like in likes.items()}
        rules = [Rule(name, (Piece(name, shape, shape),)) for name, shape in shapes.items()]
        return rules, stored.view

    def keep(self, arrays: Mapping[str, jax.Array]) -> None:
        """Write the entry; a line in the log says why that cannot be."""
        try:
            total = self.write(arrays)
        except ConfigError as error:
            logger.warning("%s", error)
            return
        if total:
            logger.info("kept %s of weights in %s", amount(total), self.folder)

    def _verified(self, likes: Likes, files: ModelFiles) -> Checkpoint:
        """The entry, read once to compare its sums. Raises Damaged."""
        checkpoint = Checkpoint(files)
        try:
            sums = json.loads((self.folder / SUMS).read_bytes())
        except (OSError, ValueError):
            raise Damaged from None
        whole = {
            name: (STORED_NAMES[np.dtype(like.dtype)], like.shape) for name, like in likes.items()
        }
        stored = {name: (entry.dtype, entry.shape) for name, entry in checkpoint.entries.items()}
        if checkpoint.problems or not isinstance(sums, dict) or stored != whole:
            raise Damaged
        views = map(checkpoint.array, likes)
        with ThreadPoolExecutor(readers(), thread_name_prefix="kept") as pool:
            try:
                for name, read_sum in zip(likes, pool.map(_sum, views), strict=True):
                    if read_sum != sums.get(name):
                        raise Damaged
            except OSError:
                raise Damaged from None
        return checkpoint

    def write(self, arrays: Mapping[str, jax.Array]) -> int:
        """Write the entry, in place of one that is damaged; returns its bytes, 0 where another
        process writes it. Raises ConfigError in one line; then nothing is left behind."""
        parts = [Part(name, STORED_NAMES[np.dtype(a.dtype)], a.shape) for name, a in arrays.items()]
        total = sum(part.size for part in parts)
        cache = self.folder.parent
        try:
            cache.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(cache).free
            if total > free:
                raise ConfigError(
                    f"cannot keep weights in {cache}: they take {amount(total)}, {amount(free)} "
                    "are free; make room, or name another directory"
                )
            with self._lock.open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._write(parts, arrays)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConfigError(
                f"cannot keep weights in {cache}: {error.strerror or error}"
            ) from None
        return total

    def _write(self, parts: list[Part], arrays: Mapping[str, jax.Array]) -> None:
        shutil.rmtree(self._unfinished, ignore_errors=True)  # of a process that was killed
        self._unfinished.mkdir()
        try:
            sums = {}
            with (self._unfinished / FILE).open("xb") as file:
                first = header(parts)
                file.write(len(first).to_bytes(8, "little") + first)
                for part in parts:
                    array = np.ascontiguousarray(arrays[part.name])
                    sums[part.name] = zlib.crc32(_bytes(array))
                    file.write(_bytes(array))
                file.flush()
                os.fsync(file.fileno())
            (self._unfinished / SUMS).write_text(json.dumps(sums))
            shutil.rmtree(self.folder, ignore_errors=True)
            self._unfinished.rename(self.folder)
        finally:
            shutil.rmtree(self._unfinished, ignore_errors=True)


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _sum(view: np.ndarray) -> int:
    """The CRC-32 of a tensor in a file, which is read part by part."""
    stored = view.reshape(-1).view(np.uint8)
    checksum = 0
    scratch = np.empty(min(len(stored), READ_BYTES), np.uint8)
    for start in range(0, len(stored), READ_BYTES):
        part = stored[start : start + READ_BYTES]
        into = scratch[: len(part)]
        checksum = zlib.crc32(into if mapped.read(part, into) else part, checksum)
    return checksum
