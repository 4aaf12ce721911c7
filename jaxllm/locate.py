"""Where a model's files are: the built-in demo, a local directory, or a hub id. Imports no jax."""

from __future__ import annotations

import os
from pathlib import Path

from jaxllm.config import ConfigError

DEMO = "demo"
WANTED_FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "*.jinja",
    "tokenizer*",
    "*.model",
    "*.txt",
]
UNWANTED_FILES = ["consolidated*", "original/*"]  # the weights again, in another layout


def locate(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """The local directory of `model`; a hub repository is downloaded first.

    Raises ConfigError when there is no such model.
    """
    if model == DEMO:
        return Path(__file__).parent / "demo"
    path = Path(os.path.expanduser(model))  # an unknown user's stays as it is
    if path.is_dir():
        return path
    if path.is_file():
        raise ConfigError(
            f"{model} is a file; give the directory that holds config.json and the safetensors"
        )
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ConfigError(
            f"no model at {model}: the directory does not exist "
            "(a hub id looks like owner/name; 'demo' is built in)"
        )
    return _download(model, revision, download_dir)


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
        cause = (
            str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        )
        raise ConfigError(
            f"no model at {model}: not a local directory, and the hub did not give it ({cause}); "
            "check the name, HF_ENDPOINT and HF_TOKEN, or pass a local directory"
        ) from None
