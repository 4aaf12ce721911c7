"""What is read of an ASGI scope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def route_path(scope: Mapping[str, Any]) -> str:
    """The path that the router sees: the ASGI path without the root path. No header changes it."""
    path = scope["path"]
    root = scope.get("root_path", "")
    if root and path.startswith(root + "/"):
        return path[len(root) :]
    return path


def header(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first header of that name."""
    return next((value for key, value in headers if key == name), None)
