"""The files of a model's weights, each opened once."""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from jaxllm.locate import Closable
from jaxllm.weights import sources
from jaxllm.weights.given import GivenArrays
from jaxllm.weights.sources import safetensors
from jaxllm.weights.stored import Found, Source


class ModelFiles(AbstractContextManager["ModelFiles"]):
    """The files of a model's weights, or arrays in their place.

    A start asks for them again and again: for sizes, for what is packed, for scales, and at last
    for all tensors. A folder's files are opened and their headers checked when they are first asked
    for, and stay open until `close` or the end of the `with` block. No tensor may be taken from
    them after that. Safe to use from many threads.

    Args:
        model: a model directory, or arrays.
        opened: what `locate.find` has opened of the directory; it is closed with the rest.

    Attributes:
        directory: of the model; None of arrays.
    """

    def __init__(self, model: str | Path | GivenArrays, opened: Closable | None = None):
        self.directory: Path | None = None
        self._opened = opened
        self._folders: dict[str, Found] = {}
        self._turn = threading.Lock()
        if isinstance(model, GivenArrays):
            self._folders[""] = model.found()
        else:
            self.directory = Path(model)

    @property
    def path(self) -> Path:
        """The directory, where these are no arrays."""
        assert self.directory is not None, "arrays lie in no directory"
        return self.directory

    def __exit__(self, *_: object) -> None:
        self.close()

    def found(self, folder: str = "") -> Found:
        """What the directory holds, or a folder inside it; arrays have no folders. Raises
        ConfigError for files whose format has them refused as a whole."""
        with self._turn:
            if folder not in self._folders:
                opened = None if folder else self._opened
                self._folders[folder] = _read(self.path / folder, opened)
            return self._folders[folder]

    def close(self) -> None:
        """Close all files. Memory of a mapping is given back with the last view of a tensor."""
        with self._turn:
            if self._opened is not None:
                self._opened.close()
            for folder in self._folders.values():
                for file in folder.files:
                    file.close()


# A model directory or arrays, which are opened for one call, or files that stay open after it
type Model = str | Path | GivenArrays | ModelFiles


@contextmanager
def opened(model: Model) -> Iterator[ModelFiles]:
    """The files of a model, which are closed in the end unless they were open before."""
    if isinstance(model, ModelFiles):
        yield model
        return
    with ModelFiles(model) as files:
        yield files


def _read(directory: Path, opened: object) -> Found:
    """The tensors of a directory, by the format of its weights, by default safetensors."""
    formats: list[Any] = [
        importlib.import_module(f"{sources.__name__}.{module.name}")
        for module in pkgutil.iter_modules(sources.__path__)
    ]
    source: Source = next((form for form in formats if form.holds(directory)), safetensors)
    return source.read(directory, opened)
