"""Text to token ids and back: loading, encoding, chat templates, the text of single tokens. Imports
no jax.

`encode` and `chat` are thread-safe. transformers changes flags of the shared tokenizer while it
renders a chat, so chats take a lock, and plain text is encoded by a copy of the backend.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from jaxllm.chat_template import (
    Template,
    TemplateInput,
    check_template,
    template_errors,
    template_text,
)
from jaxllm.config import ConfigError
from jaxllm.locate import check_regular, read_json
from jaxllm.templates.probes import traits_of
from jaxllm.templates.rendering import prober, render_chat
from jaxllm.templates.traits import TemplateTraits
from jaxllm.tokenizer_files import byte_alphabet, load_file, names_own_code
from jaxllm.tokenizer_files.dropped import may_drop

# Files of a directory that transformers opens
TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "chat_template.jinja chat_template.json vocab.json merges.txt vocab.txt tokenizer.model"
).split()
REMEDY = "give another one (--tokenizer) or none (--skip-tokenizer-init)"
AT_ONCE = 1024  # texts encoded together: encodings take a hundred bytes a token


class Pair(NamedTuple):
    """Token ids of two texts; those from `second` on are of the second, 0 where the tokenizer tells
    them apart by nothing."""

    ids: list[int]
    second: int = 0


class Tokenizer:
    """A Hugging Face tokenizer with the operations that the front ends need."""

    def __init__(self, hf: Any, chat_template: str | None = None):
        import tokenizers

        self.hf = hf
        if chat_template is not None:
            check_template(chat_template)
            hf.chat_template = chat_template
        backend = getattr(hf, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ConfigError(
                "this tokenizer has no tokenizer.json and cannot be converted to one; "
                "convert it with transformers first"
            )
        if "sanitize_control_tokens" not in inspect.signature(hf.apply_chat_template).parameters:
            raise ConfigError(
                "this transformers cannot keep users from writing control tokens into chats; "
                "install 5.23 or later"
            )
        self.backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self._lock = threading.Lock()
        self._traits = functools.lru_cache(maxsize=64)(self._find_traits)
        self._token_text = functools.lru_cache(maxsize=1 << 16)(self._decode_one)

    @classmethod
    def load(
        cls, path: str | Path, chat_template: str | None = None, revision: str | None = None
    ) -> Tokenizer:
        """Load from a directory or hub id; code in the repository is never run.

        The model's own chat template is that of chat_template.jinja (with others in
        additional_chat_templates), else of tokenizer_config.json, else of chat_template.json.

        Args:
            chat_template: the text or the file of a template in place of the model's own.

        Raises:
            ConfigError: there is no usable tokenizer, or config.json hides it; one line.
        """
        for name in TOKENIZER_FILES:
            check_regular(Path(path, name))
        hf = load_file(Path(path)) if Path(path).is_dir() else None
        if hf is None:
            hf = _load_by_transformers(path, revision)
        if not hf.chat_template:  # the last place where a directory may have one
            hf.chat_template = directory_template(Path(path))
        tokenizer = cls(hf, None if chat_template is None else template_text(chat_template))
        # transformers makes an empty tokenizer where a directory has no tokenizer's files
        if tokenizer.backend.get_vocab_size(with_added_tokens=False) <= 1:
            raise ConfigError(
                f"no usable tokenizer in {path}: its vocabulary is empty, so the tokenizer's files "
                f"are missing; {REMEDY}"
            )
        return tokenizer

    def check_chat_template(self) -> None:
        """Raises ConfigError when the model's own chat template is not valid Jinja."""
        template = self.templates or ""
        for source in template.values() if isinstance(template, dict) else [template]:
            check_template(source)

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of more than `n` times that many needs more than
        n tokens, unless the tokenizer `may_drop` some."""
        return max((len(token) for token in self.backend.get_vocab()), default=1)

    @functools.cached_property
    def may_drop(self) -> bool:
        """Whether characters of a text may be left out of its tokens."""
        return may_drop(self.backend)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can work."""
        return bool(self.templates)

    @property
    def format_signs(self) -> str | None:
        """Text in which the formats of the model's output show: its chat templates, and all strings
        of its response template, transformers' description of the output. Regexes in the latter
        come with the model and are not run; without escapes they show their markers."""
        template = self.templates
        if isinstance(template, dict):
            shown = list(template.values())
        else:
            shown = [template or ""]
        level = [getattr(self.hf, "response_template", None)]
        while level:
            shown += [item.replace("\\", "") for item in level if isinstance(item, str)]
            objects = [item for item in level if isinstance(item, dict)]
            lists = [item for item in level if isinstance(item, list)]
            level = [*chain(*(mapping.values() for mapping in objects), *lists)]
        return "\n".join(shown) or None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_all(
        self, texts: Sequence[str], limit: int | None, side: str = "right", special: bool = True
    ) -> list[list[int]]:
        """Token ids of texts, each cut at its `side` to `limit` tokens with the special ones, which
        stay; without these if not `special`. Many texts are encoded on all cores, outside Python's
        lock."""
        sequences: list[list[int]] = []
        specials = 0
        if special:
            specials = self.backend.num_special_tokens_to_add(False)
        room = max(0, (limit or 0) - specials)
        for start in range(0, len(texts), AT_ONCE):
            batch = list(texts[start : start + AT_ONCE])
            whole = special and limit is None
            for encoding in self.backend.encode_batch(batch, add_special_tokens=whole):
                if limit is None:
                    sequences.append(encoding.ids)
                    continue
                encoding.truncate(room, direction=side)
                sequences.append(
                    self.backend.post_process(encoding).ids if special else encoding.ids
                )
        return sequences

    def encode_pair(
        self,
        text: str,
        second_text: str,
        limit: int | None = None,
        most_of_second: int | None = None,
    ) -> Pair:
        """Token ids of two texts as the tokenizer joins them for a model that reads pairs.

        The second is cut to `most_of_second` tokens, and so that both have at most `limit` with the
        special ones.
        """
        first, second = (
            self.backend.encode(part, add_special_tokens=False) for part in (text, second_text)
        )
        if most_of_second is not None:
            second.truncate(most_of_second)
        if limit is not None:
            room = limit - self.backend.num_special_tokens_to_add(True) - len(first.ids)
            second.truncate(max(0, room))
        joined = self.backend.post_process(first, second)
        types = joined.type_ids
        return Pair(joined.ids, types.index(1) if 1 in types else 0)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; those without a token are left out."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, id: int) -> str:
        """One token as it appears in the middle of a text, U+FFFD for a part of a character, "" for
        an id without a token."""
        return self._token_text(id)

    def token_bytes(self, id: int) -> bytes:
        """The bytes of one token, exact for a part of a character where the vocabulary is
        byte-level."""
        token = self.backend.id_to_token(id)
        if token is not None and "\ufffd" in self.token_text(id):
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            alphabet = byte_alphabet()
            if all(c in alphabet for c in token):
                return bytes(alphabet[c] for c in token)
        return self.token_text(id).encode("utf-8", "replace")

    def chat(
        self,
        conversation: TemplateInput,
        *,
        sanitize: bool = True,
        chat_template: str | None = None,
    ) -> list[int]:
        """Token ids of a conversation, rendered in this process.

        The first conversation of a template finds out what it takes: it renders probes.

        Args:
            sanitize: control tokens in its texts stay text; the caller checks the roles.
            chat_template: in place of the model's own.

        Raises:
            TemplateError: the template refused the conversation or failed on it.
        """
        arguments = conversation.arguments(
            self.templates if chat_template is None else chat_template
        )
        with template_errors(), self._lock:
            template = self.hf.get_chat_template(chat_template, conversation.tools)
            text = render_chat(
                self.hf,
                arguments,
                traits=self._traits(template),
                sanitize=sanitize,
                chat_template=chat_template,
            )
        return self.encode_chat(text, sanitize)

    def encode_chat(self, text: str, sanitized: bool) -> list[int]:
        """Token ids of a rendered conversation.

        Args:
            text: what `apply_chat_template` encodes as its last step.
            sanitized: whether control tokens of the conversation are marked in it.

        Raises:
            TemplateError: the tokenizer cannot read a control token as text.
        """
        with template_errors(), self._lock:
            return self.hf(
                text,
                padding=False,
                truncation=False,
                add_special_tokens=False,
                sanitize_control_tokens=sanitized,
            )["input_ids"]

    @property
    def templates(self) -> Template:
        """The model's own chat template, or several by their names."""
        return self.hf.chat_template

    def template_facts(self) -> dict[str, Any]:
        """What rendering needs of this tokenizer, as JSON takes it: its templates, its special
        tokens, and which tokens of a conversation may be control tokens."""
        return {
            "template": self.templates,
            "special_tokens": self.hf.special_tokens_map,
            "added_tokens": [
                [token.content, token.special] for token in self.hf.added_tokens_decoder.values()
            ],
            "control_tokens": self.hf.chat_control_tokens,
        }

    def _find_traits(self, template: str) -> TemplateTraits:
        """What one template shows, by probes that are rendered in this process."""
        return traits_of(prober(self.hf, template, {}))

    def _decode_one(self, id: int) -> str:
        if self.backend.id_to_token(id) is None:
            return ""
        before = self.backend.decode([self._anchor], skip_special_tokens=False)
        both = self.backend.decode([self._anchor, id], skip_special_tokens=False)
        if both.startswith(before):
            return both[len(before) :]
        return self.backend.decode([id], skip_special_tokens=False)

    @functools.cached_property
    def _anchor(self) -> int:
        """A token that is decoded before another, which then keeps its leading space."""
        ids = self.encode("a", add_special_tokens=False)
        if ids:
            return ids[-1]
        return 0


def _load_by_transformers(path: str | Path, revision: str | None) -> Any:
    """transformers' tokenizer of a directory or hub id. Raises ConfigError."""
    try:
        return _open_by_transformers(path, revision)
    except Exception as error:
        cause = (" ".join(str(error).split()) or type(error).__name__)[:400]
        if _config_is_refused(path, revision):
            raise ConfigError(f"config.json of {path}: {cause}; correct it") from None
        raise ConfigError(f"no usable tokenizer in {path}: {cause}; {REMEDY}") from None


def _open_by_transformers(path: str | Path, revision: str | None) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    options: dict[str, Any] = {"trust_remote_code": False, "revision": revision}
    try:
        return AutoTokenizer.from_pretrained(str(path), mistral_format=False, **options)
    except Exception:
        # The repository's own class is not run, and not needed beside tokenizer.json
        if not (Path(path, "tokenizer.json").is_file() and names_own_code(Path(path))):
            raise
        return PreTrainedTokenizerFast.from_pretrained(str(path), **options)


def _config_is_refused(path: str | Path, revision: str | None) -> bool:
    """Whether config.json is what keeps transformers from loading the tokenizer."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(str(path), trust_remote_code=False, revision=revision)
    except (ValueError, OSError):  # AutoTokenizer goes on without a configuration
        return False
    except Exception:
        return True
    return False


def directory_template(directory: Path) -> Template:
    """The template of a directory's chat_template.json, where processors of models that see keep
    it: `chat_template` is one, or several by name. None without the file. Raises ConfigError."""
    path = directory / "chat_template.json"
    if not path.exists():
        return None
    template = read_json(path).get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = {entry.get("name"): entry.get("template") for entry in template}
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, dict) and all(
        isinstance(text, str) for pair in template.items() for text in pair
    ):
        return template
    raise ConfigError(f"{path}: chat_template must be a text, or texts by name")
