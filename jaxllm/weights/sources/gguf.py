"""GGUF files, whose tensors have their names and shapes of checkpoints and are computed where they
are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxllm.gguf.architecture import checkpoint_parts, checkpoint_tensors
from jaxllm.gguf.directory import model_file
from jaxllm.gguf.model import Model, open_model
from jaxllm.quantisation.schemes.gguf import INTEGERS, PARTS
from jaxllm.tensors import Deferred
from jaxllm.weights.stored import Entry, Found


@dataclass(frozen=True)
class GgufTensors:
    """A model's files as one.

    Attributes:
        name: of the first file.
        entries: its tensors by their names in checkpoints.
        tensors: the same, not yet read.
        model: the files.
    """

    name: str
    entries: Mapping[str, Entry]
    tensors: Mapping[str, Deferred]
    model: Model

    def tensor(self, name: str) -> Deferred:
        return self.tensors[name]

    def close(self) -> None:
        """Close the files; none of the tensors may be read after that."""
        self.model.close()


def _tensors(model: Model) -> GgufTensors:
    """Matrices of integers in groups in parts, all other tensors as plain numbers."""
    tensors = checkpoint_tensors(model)
    types = dict.fromkeys(tensors, "F32")
    for whole, (integers, parts) in checkpoint_parts(model).items():
        del tensors[whole], types[whole]
        for suffix, part in zip(PARTS, parts, strict=False):
            tensors[whole + suffix] = part
            types[whole + suffix] = "F32"
        types[whole + INTEGERS] = integers
    entries = {name: Entry(types[name], tensor.shape, 0, 0) for name, tensor in tensors.items()}
    return GgufTensors(model.paths[0].name, entries, tensors, model)


def holds(directory: Path) -> bool:
    """Whether the directory has weights in this format alone."""
    return any(directory.glob("*.gguf")) and not any(directory.glob("*.safetensors*"))


def read(directory: Path, opened: object = None) -> Found:
    """All tensors of a model directory, mapped and not yet read. Raises ConfigError for a file that
    cannot be read."""
    if isinstance(opened, Model):
        return Found([_tensors(opened)])
    path = model_file(directory)
    if path is None:
        return Found(problems=["no *.gguf file"], complete=False)
    return Found([_tensors(open_model(path))])
