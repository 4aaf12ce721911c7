"""Renders one conversation by transformers' parts of `apply_chat_template`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllm.chat_template import check_names, template_errors
from jaxllm.templates.history import shaped_input
from jaxllm.templates.probes import Message, Render
from jaxllm.templates.traits import TemplateTraits


def render_chat(
    tokenizer: Any,
    arguments: dict[str, Any],
    *,
    traits: TemplateTraits,
    sanitize: bool,
    chat_template: str | None = None,
) -> str:
    """The text that `apply_chat_template` encodes as its last step.

    A content that is null reaches the template where the traits want it; transformers drops it.

    Args:
        tokenizer: transformers'.
        arguments: of `TemplateInput.arguments`.
        traits: of the template, by which the messages are shaped.
        sanitize: whether control tokens of the conversation are marked.
        chat_template: in place of the tokenizer's own.

    Raises:
        TemplateError: the template refused the conversation or failed on it.
    """
    with template_errors():
        template = tokenizer.get_chat_template(chat_template, arguments["tools"])
        return _rendered(tokenizer, template, shaped_input(arguments, traits), sanitize)


def prober(tokenizer: Any, template: str, variables: dict[str, Any]) -> Render:
    """What renders the probes of a template, with the values of other variables."""

    def render(messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        arguments = {
            **variables,
            "conversation": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": True,
            "continue_final_message": False,
        }
        with template_errors():
            return _rendered(tokenizer, template, arguments, sanitize=False)

    return render


def _rendered(tokenizer: Any, template: str, arguments: dict[str, Any], sanitize: bool) -> str:
    from transformers.utils.chat_template_utils import (
        _normalize_chat_messages,
        render_jinja_template,
    )

    rest = dict(arguments)
    messages: Sequence[dict[str, Any]] = rest.pop("conversation")
    if not messages:
        raise ValueError("there is no message")
    normal = [
        message | {"content": None} if shaped.get("content", "") is None else message
        for shaped, message in zip(messages, _normalize_chat_messages(messages), strict=True)
    ]
    tools = rest.pop("tools")
    documents = rest.pop("documents")
    begins = rest.pop("add_generation_prompt")
    continues = rest.pop("continue_final_message")
    conversations = [normal]
    if sanitize:
        check_names(arguments, tokenizer._get_control_tokens(template))
        conversations, tools, documents, rest = tokenizer._mark_chat_inputs(
            template, conversations, tools, documents, rest, True, False
        )
    rendered: Any = render_jinja_template(
        conversations=conversations,
        tools=tools,
        documents=documents,
        chat_template=template,
        add_generation_prompt=begins,
        continue_final_message=continues,
        **{**tokenizer.special_tokens_map, **rest},
    )
    texts, _ = rendered
    return str(texts[0])
