"""Which file of a directory holds its tokenizer, and the tokenizer from it."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path
from typing import Any, Protocol

from jaxllm.config import ConfigError
from jaxllm.gguf.directory import TOKENIZER
from jaxllm.locate import check_regular
from jaxllm.tokenizer_files import formats
from jaxllm.tokenizer_files.byte_pairs import Built
from jaxllm.tokenizer_files.settings import Settings, read_settings

# The kinds of files with names of their own
NAMED = {
    "tekken.json": "tekken",
    TOKENIZER: "ggml",
    "sentencepiece.bpe.model": "fairseq",
}
FILE_PATTERNS = (*NAMED, "*.tiktoken", "tiktoken.model", "tokenizer.model")
MAX_BYTES = 64 * 2**20


class Format(Protocol):
    """How a tokenizer is made from its file."""

    @property
    def file_kind(self) -> str:
        """What the file is: "ggml", "tekken", "tiktoken", "sentencepiece" or "fairseq"."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Tokenizer classes of tokenizer_config.json that mean it; none = it needs no class."""

    def build(self, data: bytes, settings: Settings) -> Built:
        """The tokenizer of a file. Raises ValueError for one that is not of the format."""


def load_file(directory: Path) -> Any:
    """The tokenizer of a directory, as transformers' class for tokenizers of the Rust library; None
    when there is a tokenizer.json, which comes first, or no file that is read here.

    Raises ConfigError for a file that holds no usable tokenizer.
    """
    path = find(directory)
    if path is None:
        return None
    try:
        data = _read(path)
        settings = read_settings(directory)
        built = choose(_kind(path, data), settings.tokenizer_class).build(data, settings)
        return _wrap(directory, built)
    except ConfigError:
        raise
    except Exception as error:  # the Rust library raises plain ones
        cause = (" ".join(str(error).split()) or type(error).__name__)[:300]
        raise ConfigError(
            f"{path} holds no usable tokenizer: {cause}; download it again, or put a "
            "tokenizer.json beside it"
        ) from None


def find(directory: Path) -> Path | None:
    """The file that holds the tokenizer. Raises ConfigError when it cannot be told."""
    if (directory / "tokenizer.json").exists():
        return None
    for pattern in FILE_PATTERNS:
        paths = sorted(directory.glob(pattern))
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise ConfigError(f"{directory} has several tokenizers ({names}); leave one of them")
        if paths:
            return paths[0]
    return None


def choose(file_kind: str, tokenizer_class: str) -> Format:
    """The format of a kind that names the class, else the one that needs none.

    Raises ValueError when there is neither.
    """
    named = None
    for candidate in known():
        if candidate.file_kind == file_kind and tokenizer_class in candidate.classes:
            return candidate
        if candidate.file_kind == file_kind and not candidate.classes:
            named = candidate
    if named is None:
        classes = sorted(
            {
                name
                for candidate in known()
                if candidate.file_kind == file_kind
                for name in candidate.classes
                if name
            }
        )
        raise ValueError(
            f"how text is split is code of the tokenizer class {tokenizer_class!r}, which is not "
            f"run; known classes with {file_kind} files: {', '.join(classes)}"
        )
    return named


@functools.cache
def known() -> list[Format]:
    """All formats."""
    names = sorted(module.name for module in pkgutil.iter_modules(formats.__path__))
    return [importlib.import_module(f"{formats.__name__}.{name}").FORMAT for name in names]


def _read(path: Path) -> bytes:
    check_regular(path)
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES // 2**20} MiB")
    data = path.read_bytes()
    if data.startswith(b"version https://git-lfs"):
        raise ValueError("it is a pointer of Git LFS; run git lfs pull")
    return data


def _kind(path: Path, data: bytes) -> str:
    if path.name in NAMED:
        return NAMED[path.name]
    return "sentencepiece" if data.startswith(b"\n") else "tiktoken"  # field 1, bytes


def _wrap(directory: Path, built: Built) -> Any:
    from transformers import PreTrainedTokenizerFast

    class Converted(PreTrainedTokenizerFast):
        """Takes everything but the vocabulary from the directory."""

        @classmethod
        def convert_to_native_format(
            cls, trust_remote_code: Any = False, **settings: Any
        ) -> dict[str, Any]:
            return settings

    options: dict[str, Any] = {
        "tokenizer_object": built.backend,
        "added_tokens_decoder": {},  # they are in the backend
        "fix_mistral_regex": False,
        **built.roles,
    }
    hf = Converted.from_pretrained(str(directory), **options)
    hf.backend_tokenizer.post_processor = built.backend.post_processor
    return hf
