"""The tensors of a model's files under the names that a model's rules have for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from jaxllm.models import ModelSpec
from jaxllm.models.config.build import folders, read_name, spellings
from jaxllm.nn.rules import Piece, Rule
from jaxllm.quantisation import PackedPart, PackedTensor, Scheme, WeightFormat
from jaxllm.quantisation.scheme import Stored, same
from jaxllm.tensors import Deferred
from jaxllm.weights.model_files import ModelFiles
from jaxllm.weights.stored import PLAIN_DTYPES, Entry, Tensor, TensorFile


class Checkpoint:
    """All tensors of a model's open files, not yet read.

    Attributes:
        directory: of the model; None of arrays.
        problems: all faults of its files, a line each.
        formats: what each packed tensor can be held in, see `PackedTensor.format`.
    """

    def __init__(self, files: ModelFiles):
        self.directory = files.directory
        self._files = files
        content = files.found()
        self.problems = [*content.problems]
        self._home: dict[str, TensorFile] = {}
        self._stored: dict[str, str] = {}  # names in their files of tensors that were renamed
        self._packed: dict[str, PackedTensor] = {}
        self.formats: dict[str, WeightFormat | None] = {}
        self._excused = {*content.excused}
        self._complete = content.complete
        for file in content.files:
            self.problems += [
                f"{file.name} and {self._home[name].name} both hold {name:.100}"
                for name in file.entries
                if name in self._home
            ]
            self._home |= dict.fromkeys(file.entries, file)

    @property
    def entries(self) -> dict[str, Entry]:
        """Every tensor found, by name; a packed one in place of its parts."""
        parts = {part.name for tensor in self._packed.values() for part in tensor.parts}
        entries = {name: self._entry(name) for name in self._home if name not in parts}
        packed = {name: Entry("F32", tensor.shape, 0, 0) for name, tensor in self._packed.items()}
        return entries | packed

    def _entry(self, name: str) -> Entry:
        return self._home[name].entries[self._stored.get(name, name)]

    def rename(self, read_name: Callable[[str], str | None]) -> None:
        """Know every tensor as `read_name` says, and forget those that it gives no name."""
        stored_names: dict[str, str] = {}
        for old in self._home:
            new = read_name(old)
            if new in stored_names:
                self.problems.append(
                    f"{stored_names[new]:.100} and {old:.100} are both read as {new}"
                )
            elif new is not None:
                stored_names[new] = old
        self._stored = {new: self._stored.get(old, old) for new, old in stored_names.items()}
        self._home = {new: self._home[old] for new, old in stored_names.items()}
        self._excused = {read_name(name) or name for name in self._excused}

    def add_folder(self, folder: str) -> None:
        """Add the tensors of a folder of the model, each as `folder/name`; arrays are called so."""
        if self.directory is None:
            return
        content = self._files.found(folder)
        self.problems += [f"{folder}: {problem}" for problem in content.problems]
        for file in content.files:
            self._home |= {f"{folder}/{name}": file for name in file.entries}
            self._stored |= {f"{folder}/{name}": name for name in file.entries}

    def unpack(
        self,
        scheme: Scheme,
        held: Container[str] = (),
        spellings: Callable[[str], tuple[str, ...]] = same,
    ) -> None:
        """Know the tensors that `scheme` packs as they are when they are unpacked; those of `held`
        as their leaves. The scheme may have any of a tensor's `spellings`."""
        tensors = list(scheme.tensors(Stored(self.entries, self.array, spellings)))
        self.formats = {tensor.name: tensor.format for tensor in tensors}
        leaves = [tensor.leaves() if tensor.name in held else (tensor,) for tensor in tensors]
        packed = [leaf for group in leaves for leaf in group]
        parts = {part.name: part for tensor in packed for part in tensor.parts}
        self.problems += [
            f"{tensor.name} and {tensor.parts[0].name} are both there"
            for tensor in packed
            if tensor.name in self._home and tensor.name not in parts
        ]
        self.problems += [f"missing {name}" for name in self.missing(set(parts))]
        self.problems += filter(None, map(self._misfit, parts.values()))
        self._packed = {tensor.name: tensor for tensor in packed}

    def _misfit(self, part: PackedPart) -> str | None:
        """Why the stored tensor cannot be this part, or None."""
        if part.name not in self._home:
            return None
        entry = self._entry(part.name)
        if entry.shape != part.shape:
            return f"{part.name} has shape {list(entry.shape)}, expected {list(part.shape)}"
        if entry.dtype not in part.dtypes:
            known = ", ".join(part.dtypes)
            return f"{part.name} has dtype {entry.dtype}, which is not one of {known}"
        return None

    def missing(self, names: set[str]) -> list[str]:
        """The names among `names` that no file holds, sorted. Tensors of files in `problems` are
        not missing."""
        held = {*self._home, *self._packed, *self._excused}
        if self._complete:
            return sorted(names - held)
        return []

    def is_zero_bias(self, name: str) -> bool:
        """Whether this is the bias of a packed matrix, and has no effect: AutoGPTQ writes one for
        each matrix of a model without biases."""
        module, _, leaf = name.rpartition(".")
        if leaf != "bias" or f"{module}.weight" not in self.formats:
            return False
        return self._entry(name).dtype in PLAIN_DTYPES and not np.any(self.array(name))

    def input_scale(self, name: str) -> float | None:
        """The scale that a packed matrix gives its inputs; None where it gives none that can be
        read."""
        leaves = self._packed[name].leaves()
        leaf = next((leaf for leaf in leaves if leaf.name.endswith(".input_scale")), None)
        if leaf is None or leaf.parts[0].name not in self._home or self._misfit(leaf.parts[0]):
            return None
        return float(self.array(leaf.parts[0].name).reshape(()))

    def stored_rules(self, rules: Iterable[Rule]) -> list[Rule]:
        """The rules in the forms that the checkpoint holds, packed or plain."""
        names = self.entries
        forms = (rule.for_tensors(names) for rule in rules)
        return [replace(rule, pieces=tuple(map(self._piece, rule.pieces))) for rule in forms]

    def _piece(self, piece: Piece) -> Piece:
        """The piece of the tensor as it is stored, packed or plain."""
        if piece.name in self._packed:
            return piece
        return piece.of_plain()

    def view(self, name: str) -> Tensor:
        """The tensor as a read-only view of its file; a packed one is unpacked where it is read."""
        if (tensor := self._packed.get(name)) is None:
            return self._tensor(name)
        arrays: list[Any] = [self._tensor(part.name) for part in tensor.parts]
        return Deferred(tensor.shape, functools.partial(tensor.unpack, arrays))

    def check_values(self) -> None:
        """Raises ConfigError for a packed tensor whose scales have values that cannot be."""
        with ThreadPoolExecutor(thread_name_prefix="check") as pool:
            list(pool.map(self._check_values, self._packed.values()))

    def _check_values(self, tensor: PackedTensor) -> None:
        arrays: list[Any] = [self._tensor(part.name) for part in tensor.parts]
        tensor.check(arrays)

    def array(self, name: str) -> np.ndarray:
        """A tensor as it is stored."""
        return np.asarray(self._tensor(name))

    def _tensor(self, name: str) -> Tensor:
        return self._home[name].tensor(self._stored.get(name, name))


def named(files: ModelFiles, spec: ModelSpec) -> Checkpoint:
    """The tensors of a model's files under the names that the model's rules know."""
    checkpoint = Checkpoint(files)
    checkpoint.rename(read_name(spec, checkpoint.entries))
    if spec.scheme is not None:
        plain = [name for name, weight_format in spec.formats.items() if not weight_format.rounded]
        held = {*plain, *(f"{name}.weight" for name in plain)}
        checkpoint.unpack(spec.scheme, held, spellings(spec))
    for folder in folders(spec):
        checkpoint.add_folder(folder)
    return checkpoint
