"""What tokenizer_config.json, and its older companions, say of a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from jaxllm.locate import read_json

MAX_ID = 2**24  # far above any vocabulary; what is larger is a broken file
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class Settings:
    """The settings of one directory.

    Attributes:
        tokenizer_class: the class that the repository names, without "Fast"; "" for none.
        values: the keys of tokenizer_config.json.
        added: tokens that text is searched for, by their ids.
    """

    tokenizer_class: str
    values: Mapping[str, Any]
    added: Mapping[int, AddedToken]

    def flag(self, name: str, default: bool) -> bool:
        """A setting that is true or false; null is the default. Raises ValueError for others."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(
                f"{name} of tokenizer_config.json is {value!r}; true or false is meant"
            )
        return value

    def token(self, name: str) -> str | None:
        """The text of a token with a role, such as bos_token; None where there is none."""
        value = self.values.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{name} of tokenizer_config.json is {value!r}; a text is meant")
        return value


def read_settings(directory: Path) -> Settings:
    """Settings of a directory that need not have any.

    Raises:
        ValueError: an entry has another type than it must.
        ConfigError: a file is not JSON.
    """
    values = _optional(directory / "tokenizer_config.json")
    if "added_tokens_decoder" in values:
        entries = _entries(values["added_tokens_decoder"])
    else:
        values |= _optional(directory / "special_tokens_map.json")
        special = {str(name) for key, name in values.items() if key.endswith("_token")}
        entries = [
            (id, {"content": content, "special": content in special})
            for content, id in _optional(directory / "added_tokens.json").items()
        ]
    return Settings(_class(values), values, _added(entries))


def names_own_code(directory: Path) -> bool:
    """Whether the repository has a tokenizer class of its own, which is not run."""
    return "auto_map" in _optional(directory / "tokenizer_config.json")


def _optional(path: Path) -> dict[str, Any]:
    if path.exists():
        return read_json(path)
    return {}


def _class(values: Mapping[str, Any]) -> str:
    name = values.get("tokenizer_class")
    if name is None:
        auto_map = values.get("auto_map")
        paths = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else auto_map
        if isinstance(paths, str):
            paths = [paths]
        first = next((path for path in paths or () if isinstance(path, str)), "")
        name = first.rpartition(".")[2]
    if not isinstance(name, str):
        raise ValueError(f"tokenizer_class of tokenizer_config.json is {name!r}; a name is meant")
    return name.removesuffix("Fast")


def _entries(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise ValueError("added_tokens_decoder of tokenizer_config.json is not an object")
    return [(int(id) if id.isdecimal() else id, entry) for id, entry in value.items()]


def _added(entries: list[tuple[Any, Any]]) -> dict[int, AddedToken]:
    added: dict[int, AddedToken] = {}
    contents: set[str] = set()
    for id, entry in entries:
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content:
            raise ValueError(f"the added token {id!r} has no text")
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < MAX_ID:
            raise ValueError(
                f"the added token {content!r} has the id {id!r}; it must be 0 to {MAX_ID - 1}"
            )
        if content in contents or id in added:
            raise ValueError(f"the added token {content!r} or its id {id} is there twice")
        contents.add(content)
        special = entry.get("special") is True
        flags = {name: entry[name] is True for name in FLAGS if name in entry}
        added[id] = AddedToken(content, **{"normalized": not special, "special": special} | flags)
    return added
