"""Values of a file's keys, checked for their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.config import ConfigError

ARCHITECTURE = "general.architecture"


class Metadata:
    """The keys of a model; those without a dot in front of them belong to its architecture.

    Attributes:
        values: by their whole keys.
        architecture: what kind of model it is.
    """

    def __init__(self, values: Mapping[str, Any]):
        self.values = values
        self.architecture = self.text(f".{ARCHITECTURE}") or ""
        if not self.architecture:
            raise ConfigError(f"{ARCHITECTURE} is missing; convert the model again")

    def get(self, key: str) -> Any:
        """A value as it is, None where it is missing."""
        return self.values.get(self._whole(key))

    def text(self, key: str) -> str | None:
        return self._of(key, (str,), "text")

    def flag(self, key: str) -> bool | None:
        return self._of(key, (bool,), "true or false")

    def number(self, key: str) -> float | None:
        return self._of(key, (int, float), "a number")

    def count(self, key: str) -> int | None:
        """A number of things. One for each layer may be given where all are the same."""
        value = self.get(key)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if value is not None and (type(value) is not int or value < 0):
            raise self._error(key, value, "one whole number for all layers")
        return value

    def items(self, key: str, entry_type: type) -> list[Any] | None:
        """A list of one kind."""
        value = self.get(key)
        if value is not None and (
            not isinstance(value, list) or any(type(entry) is not entry_type for entry in value)
        ):
            raise self._error(key, value, f"a list of {entry_type.__name__}")
        return value

    def _of(self, key: str, kinds: tuple[type, ...], meant: str) -> Any:
        value = self.get(key)
        if value is not None and type(value) not in kinds:
            raise self._error(key, value, meant)
        return value

    def _whole(self, key: str) -> str:
        if key.startswith("."):
            return key[1:]
        return f"{self.architecture}.{key}"

    def _error(self, key: str, value: Any, meant: str) -> ConfigError:
        return ConfigError(
            f"{self._whole(key)} is {value!r:.80}; {meant} is expected: convert the model again"
        )
