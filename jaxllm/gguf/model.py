"""A model in one file or several."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxllm.config import ConfigError
from jaxllm.gguf.file import GgufFile, StoredTensor, open_file
from jaxllm.gguf.metadata import Metadata

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
MAX_PARTS = 1000


@dataclass(frozen=True)
class Model:
    """All tensors of a model, mapped and not yet read.

    Attributes:
        files: in their order.
        metadata: of the first file.
        tensors: by name, of all files.
    """

    files: tuple[GgufFile, ...]
    metadata: Metadata
    tensors: Mapping[str, StoredTensor]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths of the files, in their order."""
        return tuple(file.path for file in self.files)

    def close(self) -> None:
        """Close the files; no tensor may be read after that."""
        for file in self.files:
            file.close()

    def types(self) -> str:
        """The types of its numbers, the most frequent first, with their shares."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.type.name] += math.prod(tensor.shape)
        total = sum(counts.values())
        return ", ".join(
            f"{name} {100 * count / total:.0f} %" for name, count in counts.most_common()
        )


def part_paths(path: Path) -> tuple[Path, ...]:
    """All files of the model that `path` belongs to. Raises ConfigError for an absurd number."""
    match = PART.fullmatch(path.name)
    if match is None:
        return (path,)
    stem, _, count = match.groups()
    if not 1 <= int(count) <= MAX_PARTS:
        raise ConfigError(f"{path.name} is one of {count} files; at most {MAX_PARTS} are read")
    names = (f"{stem}-{part:05}-of-{count}.gguf" for part in range(1, int(count) + 1))
    return tuple(path.with_name(name) for name in names)


def open_model(path: Path) -> Model:
    """The model that a file holds, alone or with those beside it. Raises ConfigError."""
    paths = part_paths(path)
    missing = [file.name for file in paths if not file.exists()]
    if missing:
        raise ConfigError(
            f"{path} lacks {', '.join(missing[:5])}, which belong to it; download them"
        )
    files = [open_file(file) for file in paths]
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        twice = next((name for name in file.tensors if name in tensors), None)
        if twice is not None:
            raise ConfigError(f"{file.path} holds {twice:.100}, as a file before it does")
        tensors |= file.tensors
    _check_parts(files, len(tensors))
    return Model(tuple(files), Metadata(files[0].metadata), tensors)


def _check_parts(files: list[GgufFile], tensors: int) -> None:
    for index, file in enumerate(files):
        count, number = (file.metadata.get(f"split.{key}") for key in ("count", "no"))
        if (count or 1, number or 0) != (len(files), index):
            raise ConfigError(
                f"{file.path} is file {number} of {count} by its own keys, and {index} of "
                f"{len(files)} by its name; give it the name that it was published with"
            )
    stated = files[0].metadata.get("split.tensors.count")
    if stated is not None and stated != tensors:
        raise ConfigError(
            f"{files[0].path} and the files beside it hold {tensors} tensors of {stated}; "
            "download them again"
        )
