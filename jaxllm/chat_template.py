"""Chat templates: what they render, which names they read, and what is wrong with them. Imports no
tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.config import ConfigError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

type Template = str | dict[str, str] | None  # one template, several by their names, or none

RESERVED_TEMPLATE_NAMES = frozenset(
    "conversation conversations messages tools documents chat_template add_generation_prompt "
    "continue_final_message tokenize sanitize_control_tokens padding truncation max_length "
    "return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs raise_exception "
    "strftime_now loop self".split()
)
# Raised by a template's expressions
TEMPLATE_FAULTS = (
    *(TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError, MemoryError),
)


class TemplateError(ValueError):
    """A chat could not be turned into a prompt; the message is the template's own.

    Attributes:
        param: the part of the request at fault.
    """

    def __init__(self, message: str, param: str = "messages"):
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInput:
    """What a chat template renders.

    Attributes:
        messages: each with a "role" and "content" that is text.
        tools: functions in OpenAI's form; None without any.
        documents: texts to answer from, each an object as the template reads it.
        add_generation_prompt: whether the answer's message is begun.
        continue_final_message: whether the last message is left open.
        template_kwargs: other variables; names that the template does not read are dropped.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def arguments(self, template: Template) -> dict[str, Any]:
        """Arguments of `apply_chat_template`. Raises TemplateError on a conversation that no
        template can render."""
        last = self.messages[-1] if self.messages else {}
        if self.continue_final_message and last.get("tool_calls"):
            raise TemplateError(
                "continue_final_message cannot continue a message with tool_calls, "
                "which follow its text; leave out either"
            )
        known = template_variables(template)
        if self.documents and "documents" not in known:
            raise TemplateError(
                "this model's chat template reads no documents; put them into a message",
                "documents",
            )
        return known_variables(self.template_kwargs, template) | {
            "conversation": self.messages,
            "tools": self.tools,
            "documents": self.documents,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }


@contextmanager
def template_errors() -> Iterator[None]:
    """Raises TemplateError in place of what rendering raises."""
    import jinja2

    try:
        yield
    except TemplateError:
        raise
    except jinja2.TemplateError as error:
        raise TemplateError(f"the chat template refused the conversation: {error}") from None
    except TEMPLATE_FAULTS as error:
        # The rest of the message is the whole conversation
        cause = str(error).partition("Final message to continue")[0]
        raise TemplateError(f"the chat template failed on the conversation: {cause}") from None


def check_names(value: Any, control_tokens: tuple[str, ...]) -> None:
    """Raises TemplateError on a member's name that holds a control token: transformers keeps
    control tokens in values alone from being read as such."""
    names: dict[str, None] = {}
    level = [value]
    while level:
        objects = [item for item in level if isinstance(item, dict)]
        lists = [item for item in level if isinstance(item, (list, tuple))]
        for mapping in objects:
            names.update(dict.fromkeys(map(str, mapping)))
        level = [item for mapping in objects for item in mapping.values()]
        level += [item for items in lists for item in items]
    text = "\0".join(names)
    control = next((token for token in control_tokens if token in text), None)
    if control is not None:
        raise TemplateError(
            f"the name of a member holds the control token {control!r}, "
            "which only values may hold; rename it"
        )


def template_variables(template: Template) -> frozenset[str]:
    """Names that a template reads, which `chat_template_kwargs` may set."""
    if isinstance(template, dict):
        return frozenset().union(*map(_variables, template.values()))
    return _variables(template or "")


def known_variables(values: dict[str, Any], template: Template) -> dict[str, Any]:
    """The values among `values` that the template reads and the renderer does not set."""
    known = template_variables(template) - RESERVED_TEMPLATE_NAMES
    return {name: value for name, value in values.items() if name in known}


@functools.lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str]:
    import jinja2.meta

    return frozenset(jinja2.meta.find_undeclared_variables(_jinja().parse(template)))


def check_template(template: str) -> None:
    """Raises ConfigError when a chat template is not valid Jinja or names an unknown filter."""
    import jinja2

    try:
        _jinja().compile(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template is not valid Jinja (line {error.lineno}): {error}; "
            "correct it, or give another one (--chat-template)"
        ) from None


@functools.cache
def _jinja() -> ImmutableSandboxedEnvironment:
    """Jinja with the tags that transformers knows."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """Marks the assistant's part in templates that are also trained with."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return ImmutableSandboxedEnvironment(extensions=[Generation, jinja2.ext.loopcontrols])


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
