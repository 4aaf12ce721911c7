"""A model directory written anew: its weights in another type, or in files of another size.

The form of the files: https://huggingface.co/docs/safetensors, "Format". One tensor at a time is in
memory, and a directory that is not finished has another name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxllm.config import ConfigError
from jaxllm.models.config.read import add_quantisation, with_dtype
from jaxllm.units import amount
from jaxllm.weights.model_files import ModelFiles
from jaxllm.weights.reader import Checkpoint
from jaxllm.weights.sources.safetensors import INDEX
from jaxllm.weights.stored import PLAIN_DTYPES, STORED_DTYPES

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Weights in other forms; what they hold is in the new files
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
ALIGNMENT = 8  # bytes of a header are a multiple of it, as in the format's own library


@dataclass(frozen=True)
class Written:
    """What `convert` did: tensors, files, and bytes of weights before and after."""

    tensors: int
    files: int
    before: int
    after: int


@dataclass(frozen=True)
class Part:
    """One tensor of a new file.

    Attributes:
        name: in the file.
        dtype: as safetensors calls it.
        shape: of the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * STORED_DTYPES[self.dtype].itemsize


def convert(source: Path, target: Path, dtype: str | None, shard_bytes: int) -> Written:
    """Write the model of `source` to `target`, which must not be there.

    Args:
        dtype: one of DTYPES for every tensor of 16 bits or more; None keeps each tensor's.
        shard_bytes: of the largest file, unless one tensor is larger.

    Raises ConfigError in one line; then nothing is left behind.
    """
    settings = _settings(source, dtype)
    with ModelFiles(source) as files:
        checkpoint = Checkpoint(files)
        if checkpoint.problems:
            raise ConfigError(f"{source} cannot be converted: {checkpoint.problems[0]}")
        entries = checkpoint.entries
        parts = [
            Part(name, _new_dtype(entry.dtype, dtype), entry.shape)
            for name, entry in entries.items()
        ]
        shards = list(_shards(parts, shard_bytes))
        _write_directory(checkpoint, shards, settings, source, target)
    before = sum(entry.end - entry.begin for entry in entries.values())
    return Written(len(parts), len(shards), before, sum(part.size for part in parts))


def _write_directory(
    checkpoint: Checkpoint,
    shards: list[list[Part]],
    settings: dict[str, object],
    source: Path,
    target: Path,
) -> None:
    """The new directory, whole or not at all. Raises ConfigError."""
    if os.path.lexists(target):
        raise ConfigError(f"{target} is there already; name another directory")
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        unfinished.mkdir()
    except FileExistsError:
        raise ConfigError(
            f"{unfinished} is there: another conversion runs, or was killed; then remove it"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}") from None
    try:
        _write_shards(checkpoint, shards, unfinished)
        _copy_rest(source, unfinished)
        (unfinished / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        unfinished.rename(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _settings(source: Path, dtype: str | None) -> dict[str, object]:
    """config.json for the new directory. Raises ConfigError."""
    try:
        settings = json.loads((source / "config.json").read_bytes())
    except (OSError, ValueError):
        raise ConfigError(f"{source} is no model: there is no config.json to be read") from None
    if not any(source.glob("*.safetensors")):
        raise ConfigError(
            f"{source} has no *.safetensors file; pickles are never read, "
            "and other formats are served as they are"
        )
    if dtype is None:
        return dict(settings)
    add_quantisation(source, settings)  # which is refused
    return with_dtype(settings, dtype)


def _new_dtype(stored: str, dtype: str | None) -> str:
    if dtype is not None and stored in PLAIN_DTYPES:
        return DTYPES[dtype]
    return stored


def _shards(parts: Iterable[Part], limit: int) -> Iterator[list[Part]]:
    """Tensors of each file, in their order."""
    shard: list[Part] = []
    for part in parts:
        if shard and sum(tensor.size for tensor in shard) + part.size > limit:
            yield shard
            shard = []
        shard.append(part)
    yield shard


def _write_shards(checkpoint: Checkpoint, shards: list[list[Part]], folder: Path) -> None:
    """The files and, of several, their index."""
    count = len(shards)
    places = dict[str, str]()
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if count > 1:
            name = f"model-{number:05}-of-{count:05}.safetensors"
        places |= {part.name: name for part in shard}
        with (folder / name).open("xb") as file:
            first = header(shard)
            file.write(len(first).to_bytes(8, "little") + first)
            for part in shard:
                array = np.asarray(checkpoint.view(part.name))
                file.write(_cast(array, part).tobytes())
            file.flush()
            os.fsync(file.fileno())
    if count > 1:
        total = sum(part.size for shard in shards for part in shard)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def header(shard: list[Part]) -> bytes:
    """The JSON header of a file of these tensors, with spaces to the alignment."""
    entries: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for part in shard:
        offsets = [offset, offset := offset + part.size]
        entries[part.name] = {
            "dtype": part.dtype, "shape": list(part.shape), "data_offsets": offsets
        }  # fmt: skip
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % ALIGNMENT)


def _cast(array: np.ndarray, part: Part) -> np.ndarray:
    """The tensor in its new type, rounded to nearest even. Raises ConfigError when a finite number
    becomes infinite."""
    dtype = STORED_DTYPES[part.dtype]
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if ml_dtypes.finfo(dtype).max < ml_dtypes.finfo(array.dtype).max:
        lost = np.isinf(cast.astype(np.float32)) & np.isfinite(array.astype(np.float32))
        if lost.any():
            raise ConfigError(
                f"{part.name} has numbers that {part.dtype} cannot hold; use --dtype bfloat16"
            )
    return cast


def _copy_rest(source: Path, target: Path) -> None:
    """Everything else of a model: its tokenizer, templates, and folders of its modules."""
    for path in sorted(source.iterdir()):
        if path.is_dir():
            if (path / "config.json").is_file():
                shutil.copytree(path, target / path.name)
        elif path.is_file() and path.suffix not in WEIGHTS and path.name != INDEX:
            shutil.copyfile(path, target / path.name)


def summary(written: Written, target: Path) -> str:
    """One line about what was done."""
    files = "one file" if written.files == 1 else f"{written.files} files"
    return (
        f"{written.tensors} tensors in {files} at {target}: "
        f"{amount(written.before)} became {amount(written.after)}"
    )
