"""Recorded request bodies without their texts, and back to full length.

    python -m tests.clients.reshape RECORDING.json … --out tests/clients/bodies

A recording is `{"path": …, "headers": {…}, "body": {…}}` as a client sent it. Field names, types,
names of tools and schemas stay, ids are numbered; every other string becomes its length. `expanded`
puts filler of that length in its place.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import uuid
from itertools import cycle, islice
from typing import Any

# Fields whose strings are names, not texts
NAMES = frozenset(
    "type role name id call_id tool_call_id tool_use_id model status enum required const default "
    "format pattern syntax effort summary verbosity tool_choice include keep context".split()
)
HEADERS = ("accept", "anthropic-version", "anthropic-beta", "content-type")
FILLER = 'Words fill a prompt; some are “naïve”, and some are `code < "x"`:\n\n- one\n- two 🎉\n'
LENGTH = re.compile(r"<(\d+) characters>")
UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def shape(value: Any, key: str = "") -> Any:
    """A body with lengths in place of texts. `key` is the field that holds it."""
    if isinstance(value, dict):
        return {name: shape(member, name) for name, member in value.items()}
    if isinstance(value, list):
        return [shape(member, key) for member in value]
    if not isinstance(value, str) or key in NAMES or not value:
        return value
    if key == "arguments":  # JSON in a string
        return json.dumps(shape(json.loads(value)))
    return f"<{len(value)} characters>"


def numbered(text: str) -> str:
    """JSON whose UUIDs are counted up, equal ones alike."""
    numbers: dict[str, int] = {}
    return UUID.sub(
        lambda found: str(uuid.UUID(int=numbers.setdefault(found[0], len(numbers) + 1))), text
    )


def expanded(value: Any, key: str = "") -> Any:
    """A body with filler in place of lengths."""
    if isinstance(value, dict):
        return {name: expanded(member, name) for name, member in value.items()}
    if isinstance(value, list):
        return [expanded(member, key) for member in value]
    if key == "arguments" and isinstance(value, str):
        return json.dumps(expanded(json.loads(value)))
    found = LENGTH.fullmatch(value) if isinstance(value, str) else None
    return filler(int(found[1])) if found else value


def filler(length: int) -> str:
    """So many characters of text."""
    return "".join(islice(cycle(FILLER), length))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recordings", type=pathlib.Path, nargs="+")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    for path in arguments.recordings:
        found = json.loads(numbered(path.read_text()))
        headers = {name.lower(): value for name, value in found["headers"].items()}
        made = {
            "path": found["path"],
            "headers": {name: headers[name] for name in HEADERS if name in headers},
            "body": shape(found["body"]),
        }
        (arguments.out / path.name).write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
