"""Formats by name, and the format that a chat template speaks."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType
from typing import Any

from jaxllm.server.parsing import reasoning, tools
from jaxllm.server.parsing.calls import ToolParser
from jaxllm.server.parsing.thinking import ReasoningParser


@functools.cache
def tool_formats() -> dict[str, type[ToolParser]]:
    """Formats of tool calls by file name."""
    return _parsers(tools)


@functools.cache
def reasoning_formats() -> dict[str, type[ReasoningParser]]:
    """Formats of reasoning by file name."""
    return _parsers(reasoning)


def find_tools(name: str, template: str | None) -> type[ToolParser] | None:
    """The format of a name or alias; with "auto" the template's, None if it has none or for "none".

    Raises ValueError for an unknown name.
    """
    return _find("tool call", tool_formats(), name, template)


def find_reasoning(name: str, template: str | None) -> type[ReasoningParser] | None:
    """As `find_tools`."""
    return _find("reasoning", reasoning_formats(), name, template)


def is_auto(name: str) -> bool:
    """Whether the template chooses the format."""
    return _plain(name) == "auto"


def shown_signs(
    parser: type[ToolParser] | type[ReasoningParser] | None, template: str | None
) -> tuple[str, ...]:
    """The signs of a format that a template has: all of a set, the first such set; or none."""
    if parser is not None:
        sets = (parser.signs, *parser.other_signs)
    else:
        sets = ()
    return next((signs for signs in sets if all(sign in (template or "") for sign in signs)), ())


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _parsers(folder: ModuleType) -> dict[str, Any]:
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    return {name: importlib.import_module(f"{folder.__name__}.{name}").Parser for name in names}


def _find(purpose: str, formats: dict[str, Any], name: str, template: str | None) -> Any:
    if is_auto(name):
        return _spoken(formats, template or "")
    plain = _plain(name)
    if plain == "none":
        return None
    for format_name, parser in formats.items():
        if plain == format_name or plain in parser.aliases:
            return parser
    known = ", ".join(formats)
    raise ValueError(f"no {purpose} format is called {name!r}; use auto, none or one of: {known}")


def _spoken(formats: dict[str, Any], template: str) -> Any:
    """Of the formats whose signs the template has, the one with most to show."""
    shown = {parser: sum(map(len, shown_signs(parser, template))) for parser in formats.values()}
    best = max(shown, key=lambda parser: shown[parser], default=None)
    if best is not None and shown[best]:
        return best
    return None
