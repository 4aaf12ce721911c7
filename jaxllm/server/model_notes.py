"""What a model's own folder says to its users: a line about it, and things to ask it.

`page.json` beside config.json may hold `description`, a text, and `examples`, a list of prompts.
It is optional, and a file that cannot be used is reported and ignored: no model needs it.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

FILE = "page.json"
MAX_BYTES = 64 << 10
MAX_DESCRIPTION = 300  # characters
MAX_EXAMPLES = 8
MAX_EXAMPLE = 200  # characters

logger = logging.getLogger("jaxllm.server")


@dataclass(frozen=True)
class ModelNotes:
    """A model's line about itself, "" without one, and prompts that it answers well."""

    description: str = ""
    examples: tuple[str, ...] = ()


def read_notes(model_dir: Path) -> ModelNotes:
    """The notes of a model's folder; empty ones where it has none, or none that can be used."""
    path = model_dir / FILE
    try:
        if not path.is_file():
            return ModelNotes()
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        return checked(content)
    except (OSError, ValueError) as error:
        logger.warning("%s is not used: %s", path, error)
        return ModelNotes()


def checked(content: bytes) -> ModelNotes:
    """The notes of a file. Raises ValueError on any other content."""
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    notes = json.loads(content)
    if not isinstance(notes, dict):
        raise ValueError("it must be an object with description and examples")
    description = notes.get("description", "")
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION:
        raise ValueError(f"description must be a text of at most {MAX_DESCRIPTION} characters")
    examples = notes.get("examples", [])
    if not isinstance(examples, list) or len(examples) > MAX_EXAMPLES:
        raise ValueError(f"examples must be a list of at most {MAX_EXAMPLES} texts")
    for example in examples:
        if not isinstance(example, str) or not 0 < len(example) <= MAX_EXAMPLE:
            raise ValueError(f"an example must be a text of 1 to {MAX_EXAMPLE} characters")
    return ModelNotes(description, tuple(examples))
