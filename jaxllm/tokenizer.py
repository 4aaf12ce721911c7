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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.config import ConfigError
from jaxllm.locate import check_regular

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

RESERVED_TEMPLATE_NAMES = frozenset(
    "conversation conversations messages tools documents chat_template add_generation_prompt "
    "continue_final_message tokenize sanitize_control_tokens padding truncation max_length "
    "return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs raise_exception "
    "strftime_now loop self".split()
)
# Files of a directory that transformers opens
TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "chat_template.jinja chat_template.json vocab.json merges.txt vocab.txt tokenizer.model"
).split()
REMEDY = "give another one (--tokenizer) or none (--skip-tokenizer-init)"
# Raised by a template's expressions
TEMPLATE_FAULTS = (
    *(TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError, MemoryError),
)


class TemplateError(ValueError):
    """A chat could not be turned into a prompt; the message is the template's own."""


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
        self._token_text = functools.lru_cache(maxsize=1 << 16)(self._decode_one)

    @classmethod
    def load(
        cls, path: str | Path, chat_template: str | None = None, revision: str | None = None
    ) -> Tokenizer:
        """Load from a directory or hub id; code in the repository is never run.

        Args:
            chat_template: the text or the file of a template in place of the model's own.

        Raises:
            ConfigError: there is no usable tokenizer, or config.json hides it; one line.
        """
        for name in TOKENIZER_FILES:
            check_regular(Path(path, name))
        from transformers import AutoTokenizer

        try:
            hf = AutoTokenizer.from_pretrained(
                str(path), trust_remote_code=False, revision=revision
            )
        except Exception as error:
            cause = (" ".join(str(error).split()) or type(error).__name__)[:400]
            if _config_is_refused(path, revision):
                raise ConfigError(f"config.json of {path}: {cause}; correct it") from None
            raise ConfigError(f"no usable tokenizer in {path}: {cause}; {REMEDY}") from None
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
        template = self.hf.chat_template or ""
        for source in template.values() if isinstance(template, dict) else [template]:
            check_template(source)

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of more than `n` times that many needs more than
        n tokens."""
        return max((len(token) for token in self.backend.get_vocab()), default=1)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can work."""
        return bool(self.hf.chat_template)

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template, of all of them where there are several."""
        template = self.hf.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

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
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        sanitize: bool = True,
        chat_template: str | None = None,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            template_kwargs: names that the template does not read are dropped.
            sanitize: control tokens in messages stay text; the caller checks the roles.
            chat_template: in place of the model's own.

        Raises:
            TemplateError: the template refused the conversation or failed on it.
        """
        import jinja2

        if continue_final_message and messages and messages[-1].get("tool_calls"):
            raise TemplateError(
                "continue_final_message cannot continue a message with tool_calls, "
                "which follow its text; leave out either"
            )

        known = (
            self.template_variables if chat_template is None else template_variables(chat_template)
        )
        variables = {
            name: value
            for name, value in (template_kwargs or {}).items()
            if name in known and name not in RESERVED_TEMPLATE_NAMES
        }
        try:
            with self._lock:
                return self.hf.apply_chat_template(
                    messages,
                    chat_template=chat_template,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=True,
                    return_dict=False,
                    sanitize_control_tokens=sanitize,
                    **variables,
                )
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refused the conversation: {error}") from None
        except TEMPLATE_FAULTS as error:
            # The rest of the message is the whole conversation
            cause = str(error).partition("Final message to continue")[0]
            raise TemplateError(f"the chat template failed on the conversation: {cause}") from None

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the model's own chat template reads."""
        template = self.hf.chat_template
        return template_variables(template) if isinstance(template, str) else frozenset()

    def _decode_one(self, id: int) -> str:
        if self.backend.id_to_token(id) is None:
            return ""
        before = self.backend.decode([self._anchor], skip_special_tokens=False)
        both = self.backend.decode([self._anchor, id], skip_special_tokens=False)
        return (
            both[len(before) :]
            if both.startswith(before)
            else self.backend.decode([id], skip_special_tokens=False)
        )

    @functools.cached_property
    def _anchor(self) -> int:
        """A token that is decoded before another, which then keeps its leading space."""
        ids = self.encode("a", add_special_tokens=False)
        return ids[-1] if ids else 0


@functools.lru_cache(maxsize=64)
def template_variables(template: str) -> frozenset[str]:
    """Names that a chat template reads, which `chat_template_kwargs` may set."""
    import jinja2.meta

    try:
        return frozenset(jinja2.meta.find_undeclared_variables(_jinja().parse(template)))
    except jinja2.TemplateError:
        return frozenset()  # templates with tags of their own, e.g. {% generation %}


def check_template(template: str) -> None:
    """Raises ConfigError when a chat template is not valid Jinja or names an unknown filter. Tags
    that only transformers knows are accepted."""
    import jinja2

    try:
        _jinja().compile(template)
    except jinja2.TemplateSyntaxError as error:
        if "generation" not in str(error):
            raise ConfigError(
                f"the chat template is not valid Jinja (line {error.lineno}): {error}; "
                "correct it, or give another one (--chat-template)"
            ) from None


@functools.cache
def _jinja() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up, without the tags of its own."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])


def template_text(source: str) -> str:
    """The chat template of `--chat-template`, which is a file or the template itself. Raises
    ConfigError."""
    if "{" in source or "\n" in source:
        return source
    try:
        return Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError) as error:  # an unknown user's home
        raise ConfigError(
            f"cannot read the chat template {source}: {getattr(error, 'strerror', None) or error}"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read the chat template {source}: not UTF-8 text") from None


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


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The byte of each printable stand-in of byte-level vocabularies (GPT-2's): printable bytes
    stand for themselves, the others are numbered from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + at): byte for at, byte in enumerate(others)
    }
