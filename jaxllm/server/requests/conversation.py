"""The conversation of a request: messages, and how a chat template renders them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxllm.chat_template import RESERVED_TEMPLATE_NAMES, TemplateInput
from jaxllm.server.errors import bad_request, describe
from jaxllm.server.requests.fields import check_json, read_field, read_optional
from jaxllm.server.requests.limits import Rules, check_chars
from jaxllm.server.requests.messages import for_template, read_messages
from jaxllm.server.requests.tools import NO_TOOLS, Tool, ToolUse, read_tool_use

MAX_KWARGS = 64
MAX_KWARG_CHARS = 64 << 10  # of all together
MAX_DOCUMENTS = 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages in the form that chat templates take."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]
    tools: ToolUse = NO_TOOLS
    documents: list[dict[str, Any]] | None = None

    @property
    def shown_tools(self) -> tuple[Tool, ...]:
        """The tools that the template gets: all, or none where none may be called."""
        if self.tools.mode == "none":
            return ()
        return self.tools.tools

    @property
    def template_input(self) -> TemplateInput:
        """What the chat template renders."""
        return TemplateInput(
            messages=[for_template(message) for message in self.messages],
            tools=[tool.form for tool in self.shown_tools] or None,
            documents=self.documents,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs,
        )

    @property
    def calls(self) -> int:
        """Tool calls in the messages."""
        return sum(len(message.get("tool_calls", ())) for message in self.messages)


def read_conversation(body: dict[str, Any], rules: Rules, answered: bool = True) -> Conversation:
    """The messages and how to render them: by default with the begin of a new answer if they are
    to be `answered` and none is continued. Raises ApiError."""
    truncated = body.get("truncate_prompt_tokens") is not None
    messages = read_messages(body.get("messages"), rules, truncated)
    if body.get("chat_template") is not None:
        raise bad_request(
            "chat_template is not accepted from clients; "
            "the server's operator chooses it with --chat-template",
            "chat_template",
        )
    kwargs = rules.template_kwargs | read_template_kwargs(body)
    continues = read_field(body, "continue_final_message", bool, False)
    prompts = read_field(body, "add_generation_prompt", bool, answered and not continues)
    if continues and prompts:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    return Conversation(
        messages=messages,
        add_generation_prompt=prompts,
        continue_final_message=continues,
        template_kwargs=kwargs,
        tools=read_tool_use(body),
        documents=read_documents(body, rules, truncated),
    )


def read_template_kwargs(body: dict[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs`, which win over those of `read_effort`: values under names that are
    not the renderer's own. Raises ApiError(400)."""
    kwargs = read_field(body, "chat_template_kwargs", dict, {})
    return read_effort(body) | check_template_kwargs(kwargs)


def read_effort(body: dict[str, Any]) -> dict[str, Any]:
    """The template arguments that `reasoning_effort` and `thinking_token_budget` stand for, by the
    names of several models; a template reads its own. Raises ApiError(400)."""
    effort = read_optional(body, "reasoning_effort", str)
    budget = read_optional(body, "thinking_token_budget", int)
    kwargs: dict[str, Any] = {}
    if budget is not None:
        kwargs["thinking_budget"] = budget
    if effort is None:
        return kwargs
    if effort not in EFFORTS:
        raise bad_request(
            f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {describe(effort)}",
            "reasoning_effort",
        )
    thinks = effort != "none"
    return kwargs | {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


def check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A copy of harmless template arguments. Raises ApiError(400) on a reserved name and on values
    that are too large together."""
    if len(kwargs) > MAX_KWARGS:
        raise bad_request(
            f"chat_template_kwargs takes at most {MAX_KWARGS} names, got {len(kwargs)}",
            "chat_template_kwargs",
        )
    for name in kwargs:
        if name in RESERVED_TEMPLATE_NAMES or name.endswith(("_token", "_tokens")):
            raise bad_request(
                f"chat_template_kwargs must not set {describe(name)}", "chat_template_kwargs"
            )
    check_json("chat_template_kwargs", kwargs, MAX_KWARG_CHARS)
    return dict(kwargs)


def read_documents(
    body: dict[str, Any], rules: Rules, truncated: bool
) -> list[dict[str, Any]] | None:
    """`documents`: objects that the template reads; None without any. Raises ApiError(400)."""
    documents = read_field(body, "documents", list, [])
    if len(documents) > MAX_DOCUMENTS:
        raise bad_request(
            f"at most {MAX_DOCUMENTS} documents per request, got {len(documents)}", "documents"
        )
    for index, document in enumerate(documents):
        if not isinstance(document, dict):
            raise bad_request(
                f"documents[{index}] must be an object, such as one with title and text, "
                f"got {describe(document)}",
                f"documents[{index}]",
            )
    chars = sum(
        len(text.strip())
        for document in documents
        for text in document.values()
        if isinstance(text, str)
    )
    check_chars(chars, rules, "documents", truncated)
    check_json("documents", documents, 2 * rules.char_limit(truncated))
    return documents or None
