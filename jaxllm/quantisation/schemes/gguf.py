"""Blocks of GGUF files, unpacked by their source before anything else sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.quantisation.scheme import Header, PackedTensor


@dataclass(frozen=True)
class Gguf:
    """The scheme; `types` are those of the file's blocks with their shares."""

    types: str
    method = "gguf"

    @property
    def title(self) -> str:
        return f"GGUF ({self.types})"

    def tensors(self, stored: Mapping[str, Header]) -> Iterator[PackedTensor]:
        """None: the file's tensors are plain when they are seen here."""
        return iter(())


def read(settings: Mapping[str, Any]) -> Gguf:
    """The scheme of these settings."""
    return Gguf(f"{settings.get('types', 'types of its own'):.200}")
