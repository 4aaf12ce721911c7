"""Checkpoints of llm-compressor (compressed-tensors): `config_groups` says for the modules that
their `targets` name in which format they are stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.quantisation import fp4_groups, packed_groups, scaled_groups
from jaxllm.quantisation.scaled_groups import check_targets
from jaxllm.quantisation.scheme import Header, PackedTensor, Scheme
from jaxllm.quantisation.weight_format import WeightFormat

type Groups = Mapping[str, Mapping[str, Any]]

PARTS = ("weights", "input_activations")
# What reads the groups of each format
FORMATS: Mapping[str, Callable[[Groups], Scheme]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("float-quantized", "int-quantized", "naive-quantized"), scaled_groups.read
        ),
        "mxfp8-quantized": scaled_groups.read_exponents,
        "pack-quantized": packed_groups.read,
        **dict.fromkeys(("nvfp4-pack-quantized", "mxfp4-pack-quantized"), fp4_groups.read),
    }
)


@dataclass(frozen=True)
class CompressedTensors:
    """The schemes of the formats that a checkpoint has."""

    schemes: tuple[Scheme, ...]
    method = "compressed-tensors"

    @property
    def title(self) -> str:
        return f"compressed-tensors: {', '.join(scheme.title for scheme in self.schemes)}"

    def usual(self, shape: tuple[int, ...]) -> WeightFormat | None:
        return next(filter(None, (scheme.usual(shape) for scheme in self.schemes)), None)

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[PackedTensor]:
        for scheme in self.schemes:
            yield from scheme.tensors(stored)


def read(settings: Mapping[str, Any]) -> CompressedTensors:
    """The scheme of these settings. Raises ConfigError."""
    for key in ("transform_config", "sparsity_config"):
        setting = settings.get(key)
        if setting and not (isinstance(setting, dict) and setting.get("format") == "dense"):
            raise ConfigError(f"{key} is not supported")
    if settings.get("ignore") is not None:
        check_targets("ignore", settings["ignore"])
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError("config_groups must be an object with a group")
    by_reader: dict[Callable[[Groups], Scheme], dict[str, Mapping[str, Any]]] = {}
    for name, group in groups.items():
        where = f"config_groups.{name}"[:80]
        if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
            raise ConfigError(f"{where} must be an object with weights")
        if group.get("output_activations"):
            raise ConfigError(f"{where} has output_activations, which are not supported")
        check_targets(f"{where}.targets", group.get("targets"))
        form = group.get("format") or settings.get("format")
        if not isinstance(form, str) or form not in FORMATS:
            raise ConfigError(
                f"{where} has the format {form!r:.40}; those that are read are {', '.join(FORMATS)}"
            )
        completed = {part: _completed(group[part]) for part in PARTS if part in group}
        by_reader.setdefault(FORMATS[form], {})[where] = {**group, **completed}
    return CompressedTensors(
        tuple(reader(reader_groups) for reader, reader_groups in by_reader.items())
    )


def _completed(settings: Any) -> Any:
    """Settings of numbers with what their library adds: its words are lower-case, a missing
    strategy follows from the group size, and older files have "128x128" as block_structure."""
    if not isinstance(settings, dict):
        return settings
    words = {
        key: settings[key] for key in ("type", "strategy") if isinstance(settings.get(key), str)
    }
    completed = settings | {key: word.lower() for key, word in words.items()}
    size = completed.get("group_size")
    block = completed.get("block_structure")
    if completed.get("strategy") is None and (size is None or type(size) is int):
        if size is None:
            completed["strategy"] = "tensor"
        elif size == -1:
            completed["strategy"] = "channel"
        else:
            completed["strategy"] = "group"
    if isinstance(block, str) and re.fullmatch(r"\d{1,9}x\d{1,9}", block):
        completed["block_structure"] = [int(part) for part in block.split("x")]
    return {"num_bits": 8} | completed
