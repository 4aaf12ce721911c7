"""A model directory for a GGUF file: its configuration, its tokenizer and links to the weights."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.gguf.architecture import architecture
from jaxllm.gguf.config import end_ids, sampling
from jaxllm.gguf.metadata import Metadata
from jaxllm.gguf.model import Model, open_model, part_paths

SUFFIX = ".gguf"
TOKENIZER = "tokenizer.ggml.json"  # the keys of the tokenizer, without their common beginning
KEYS = "tokenizer.ggml."
CACHE = "~/.cache/jaxllm/gguf"


def model_directory(path: Path, parent: str | None = None) -> tuple[Path, Model]:
    """A directory for the model of a file, inside `parent` or the user's cache; and the model,
    which stays open. The directory is written anew each time, and the same for a file that has not
    changed.

    Raises ConfigError for a file that cannot be read, an unknown architecture, and where the
    directory cannot be written.
    """
    model = open_model(path)
    files = _contents(model)
    try:
        folder = Path(parent or CACHE).expanduser() / f"{path.stem}-{_key(model.paths)}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, content in files.items():
            with _placed(folder / name) as made:
                made.write_text(json.dumps(content))
        for part in model.paths:
            with _placed(folder / part.name) as made:
                made.symlink_to(part.resolve())
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user, or no home
        raise ConfigError(
            f"cannot write the configuration of {path}: {error}; give a directory that can be "
            "written as --download-dir"
        ) from None
    return folder, model


def model_file(directory: Path) -> Path | None:
    """The first file of the model in a directory; None without any. Raises ConfigError where it
    holds several models."""
    files = sorted(path for path in directory.glob(f"*{SUFFIX}") if "mmproj" not in path.name)
    if not files:
        return None
    others = set(files) - set(part_paths(files[0]))
    if others:
        names = ", ".join(sorted(path.name for path in files)[:10])
        raise ConfigError(f"{directory} holds several models ({names}); give the file of one")
    return files[0]


def _key(paths: tuple[Path, ...]) -> str:
    """What tells this state of the files from others."""
    stats = [(str(path.resolve()), path.stat()) for path in paths]
    facts = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _contents(model: Model) -> dict[str, Any]:
    metadata = model.metadata
    rules = architecture(model.metadata)
    config = rules.config(model)
    added = rules.added(metadata)
    if any(not tensor.type.plain for tensor in model.tensors.values()):
        config["quantization_config"] = {"quant_method": "gguf", "types": model.types()}
    tokenizer = {
        key.removeprefix(KEYS): value
        for key, value in metadata.values.items()
        if key.startswith(KEYS)
    }
    return {
        "config.json": config,
        "generation_config.json": {"eos_token_id": end_ids(metadata), **sampling(metadata)},
        "tokenizer_config.json": _tokenizer_config(metadata)
        | ({"added_tokens_decoder": added} if added else {}),
        TOKENIZER: tokenizer,
    }


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata.items(f".{KEYS}tokens", str) or []
    ids = {
        f"{role}_token": metadata.count(f".{KEYS}{key}_token_id")
        for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    }
    texts = {role: tokens[id] for role, id in ids.items() if id is not None and id < len(tokens)}
    flags = {key: metadata.flag(f".{KEYS}{key}") for key in ("add_bos_token", "add_eos_token")}
    template = metadata.text(".tokenizer.chat_template")
    named = metadata.items(".tokenizer.chat_templates", str) or []
    templates = {name: metadata.text(f".tokenizer.chat_template.{name}") for name in named}
    if template is not None and templates:
        templates["default"] = template
    listed = [{"name": name, "template": text} for name, text in templates.items() if text]
    settings = {**texts, **flags, "chat_template": listed or template}
    return {key: value for key, value in settings.items() if value is not None}


@contextmanager
def _placed(path: Path) -> Iterator[Path]:
    """Where to make a file or link, which then takes the place of what is there, at once."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        yield made
        os.replace(made, path)
