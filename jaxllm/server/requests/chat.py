"""A request for a chat's answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxllm.server.errors import bad_request
from jaxllm.server.requests.body_fields import BodyFields
from jaxllm.server.requests.conversation import Conversation, read_conversation
from jaxllm.server.requests.fields import read_field, read_optional
from jaxllm.server.requests.generation import Generation, read_generation
from jaxllm.server.requests.known_fields import (
    CHAT_FIELDS,
    CHAT_NEUTRAL,
    COMPLETION_ONLY,
    refuse_unsupported,
)
from jaxllm.server.requests.limits import Rules
from jaxllm.server.requests.tools import ToolUse

CHAT_BODY = BodyFields(
    names=CHAT_FIELDS,
    sizes={"messages": None, "documents": None},
    messages=frozenset({"messages"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """POST /v1/chat/completions, and what other endpoints of chats make of their bodies.

    Attributes:
        thinking_budget: tokens of reasoning after which it is ended; None sets no limit.
        include_reasoning: whether the reply has the reasoning.
    """

    generation: Generation
    conversation: Conversation
    thinking_budget: int | None = None
    include_reasoning: bool = True

    @property
    def tools(self) -> ToolUse:
        """The tools, and how the answer may use them."""
        return self.conversation.tools


def parse_chat(body: dict[str, Any], rules: Rules) -> ChatRequest:
    """The typed request. Raises ApiError that names the field at fault."""
    limit = "max_completion_tokens"
    if body.get(limit) is None:
        limit = "max_tokens"
    read_field(body, "max_tokens", int, 0)  # checked even where it is unused
    generation = read_generation(
        body,
        rules,
        CHAT_NEUTRAL,
        names={"max_tokens": limit, "logprobs": "top_logprobs"},
        forced={"max_tokens": body.get(limit), "logprobs": read_chat_logprobs(body)},
    )
    refuse_unsupported(body, COMPLETION_ONLY, "/v1/completions")
    return ChatRequest(
        generation=generation,
        conversation=read_conversation(body, rules),
        thinking_budget=read_budget(body),
        include_reasoning=read_field(body, "include_reasoning", bool, True),
    )


def read_budget(body: dict[str, Any]) -> int | None:
    """`thinking_token_budget`. Raises ApiError."""
    budget = read_optional(body, "thinking_token_budget", int)
    if budget is not None and budget < 0:
        raise bad_request(
            f"thinking_token_budget must be at least 0, got {budget}", "thinking_token_budget"
        )
    return budget


def read_chat_logprobs(body: dict[str, Any]) -> int | None:
    """The number in `top_logprobs` if `logprobs` is true, else None. Raises ApiError."""
    wanted = read_field(body, "logprobs", bool, False)
    top = read_optional(body, "top_logprobs", int)
    if top and not wanted:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if not wanted:
        return None
    return top or 0
