"""GGUF files, whose tensors have their names and shapes of checkpoints and are computed where they
are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxllm.gguf.architecture import checkpoint_tensors
from jaxllm.gguf.directory import model_file
from jaxllm.gguf.model import open_model
from jaxllm.tensors import Deferred
from jaxllm.weights.stored import Entry, Found


@dataclass(frozen=True)
class GgufTensors:
    """A model's files as one.

    Attributes:
        name: of the first file.
        tensors: by their names in checkpoints.
    """

    name: str
    tensors: Mapping[str, Deferred]

    @property
    def entries(self) -> dict[str, Entry]:
        return {name: Entry("F32", each.shape, 0, 0) for name, each in self.tensors.items()}

    def tensor(self, name: str) -> Deferred:
        return self.tensors[name]


def holds(directory: Path) -> bool:
    """Whether the directory has weights in this format alone."""
    return any(directory.glob("*.gguf")) and not any(directory.glob("*.safetensors*"))


def read(directory: Path) -> Found:
    """All tensors of a model directory, mapped and not yet read. Raises ConfigError for a file that
    cannot be read."""
    path = model_file(directory)
    if path is None:
        return Found(problems=["no *.gguf file"], complete=False)
    return Found([GgufTensors(path.name, checkpoint_tensors(open_model(path)))])
