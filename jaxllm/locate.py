"""Where a model's files are: the built-in demo, a local directory, or a hub id; and reading those
that hold JSON. Imports no jax."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxllm.config import ConfigError
from jaxllm.gguf.directory import SUFFIX, model_directory, model_file

DEMO = "demo"
WANTED_FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "*.txt",
]
UNWANTED_FILES = ["consolidated*", "original/*"]  # the weights again, in another layout
MAX_JSON_BYTES = 16 * 2**20


class Closable(Protocol):
    """Files that are open."""

    def close(self) -> None:
        """Close them."""


class Located(NamedTuple):
    """Where a model's files are.

    Attributes:
        directory: of its configuration, its tokenizer and its weights.
        opened: its weights where they had to be opened to make the directory, for the caller to
            close.
    """

    directory: Path
    opened: Closable | None = None


def locate(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The directory of `find`, with nothing left open."""
    located = find(model, revision, download_dir)
    if located.opened is not None:
        located.opened.close()
    return located.directory


def find(model: str, revision: str | None = None, download_dir: str | None = None) -> Located:
    """The local directory of `model`; a hub repository is downloaded first, and one is made for a
    GGUF file.

    Raises ConfigError when there is no such model, or when a GGUF file cannot be read.
    """
    if model == DEMO:
        return Located(Path(__file__).parent / "demo")
    path = Path(os.path.expanduser(model))  # an unknown user's stays as it is
    if path.is_dir():
        lone = None
        if not (path / "config.json").exists():
            lone = model_file(path)
        if lone is None:
            return Located(path)
        return Located(*model_directory(lone, download_dir))
    if path.is_file() and path.suffix == SUFFIX:
        return Located(*model_directory(path, download_dir))
    if path.is_file():
        raise ConfigError(
            f"{model} is a file; give the directory that holds config.json and the safetensors, or "
            "a .gguf file"
        )
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ConfigError(
            f"no model at {model}: the directory does not exist "
            "(a hub id looks like owner/name; 'demo' is built in)"
        )
    return Located(_download(model, revision, download_dir))


def check_regular(path: Path) -> None:
    """Raises ConfigError when anything but a regular file is there: opening a FIFO would wait."""
    if os.path.lexists(path) and not path.is_file():
        raise ConfigError(f"{path} is not a regular file; replace or remove it")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file that exists. Raises ConfigError when there is none."""
    check_regular(path)
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ConfigError(
            f"{path} is larger than {MAX_JSON_BYTES // 2**20} MiB; that is not a configuration"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; an object is expected")
    return value


def _download(model: str, revision: str | None, download_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model,
                revision=revision,
                cache_dir=download_dir,
                allow_patterns=WANTED_FILES,
                ignore_patterns=UNWANTED_FILES,
            )
        )
    except Exception as error:
        if str(error).strip():
            cause = str(error).strip().splitlines()[0][:200]
        else:
            cause = type(error).__name__
        raise ConfigError(
            f"no model at {model}: not a local directory, and the hub did not give it ({cause}); "
            "check the name, HF_ENDPOINT and HF_TOKEN, or pass a local directory"
        ) from None
