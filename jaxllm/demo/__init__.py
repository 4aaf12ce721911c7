"""The embedded default model: a Hugging Face directory of the Qwen3 family that lies beside this
file. Made by `examples/demo_model`."""

from __future__ import annotations

from pathlib import Path


def path() -> str:
    """The directory of the demo model."""
    return str(Path(__file__).parent)
