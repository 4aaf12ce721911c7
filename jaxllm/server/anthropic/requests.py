"""Bodies of the Messages API to chat requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from jaxllm.server.anthropic.messages import read_conversation
from jaxllm.server.errors import ApiError, bad_request, describe
from jaxllm.server.requests.body_fields import BodyFields
from jaxllm.server.requests.chat import ChatRequest, parse_chat
from jaxllm.server.requests.fields import read_field, read_optional
from jaxllm.server.requests.known_fields import refuse_unsupported
from jaxllm.server.requests.limits import Rules

# Known fields that change nothing here, whatever they hold
IGNORED = frozenset(
    "metadata service_tier cache_control inference_geo diagnostics speed context_management betas "
    "user_profile_id workspace_id".split()
)
# Fields of features that are not supported, with the values that request nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],)}
# Sampling options that have the same name in a chat
SAME = ("model", "stream", "temperature", "top_p", "top_k")
MESSAGES_FIELDS = frozenset(
    {*IGNORED, *NEUTRAL, *SAME}
    | {"max_tokens", "messages", "system", "stop_sequences", "thinking"}
    | {"tools", "tool_choice", "output_config", "output_format"}
)
MESSAGES_BODY = BodyFields(
    sizes={"messages": None, "system": None}, messages=frozenset({"messages"})
)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKING = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": True}
# Places in the chat body that a message names, and what they are called here
WORDS = {
    ".function.parameters": ".input_schema",
    ".function.": ".",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop must": "stop_sequences must",
    "stop takes": "stop_sequences takes",
}


def parse_messages(body: dict[str, Any], rules: Rules) -> ChatRequest:
    """The chat request of a body. Raises ApiError that names the field at fault."""
    if read_optional(body, "max_tokens", int) is None:
        raise bad_request("max_tokens is required: an integer from 1", "max_tokens")
    return _parsed(body, rules)


def parse_count(body: dict[str, Any], rules: Rules) -> ChatRequest:
    """The chat request of a body whose tokens are to be counted; they may be more than the context
    holds."""
    return _parsed(body | {"max_tokens": 1, "stream": None}, rules, {"truncate_prompt_tokens": -1})


def _parsed(
    body: dict[str, Any], rules: Rules, more: Mapping[str, Any] = MappingProxyType({})
) -> ChatRequest:
    """The chat request of a body, with more fields of a chat."""
    refuse_unsupported(body, NEUTRAL)
    chat: dict[str, Any] = {name: body.get(name) for name in SAME}
    chat["max_tokens"] = body["max_tokens"]
    chat["messages"] = read_conversation(body)
    last = chat["messages"][-1]
    if last["role"] == "assistant":  # the answer goes on from there
        if last.get("tool_calls"):
            raise bad_request(
                "messages must not end with tool_use; send the tool_result of each", "messages"
            )
        chat["continue_final_message"] = True
    chat["stop"] = read_field(body, "stop_sequences", list, []) or None
    chat |= _tools(body) | _thinking(body) | _output(body) | dict(more)
    try:
        request = parse_chat(chat, rules)
    except ApiError as error:
        error.message = in_our_words(error.message)
        raise
    generation = request.generation.with_structure_of("output_config.format")
    return replace(request, generation=generation)


def in_our_words(message: str) -> str:
    """An error's text with this protocol's names of fields."""
    for chat, ours in WORDS.items():
        message = message.replace(chat, ours)
    return message


def _tools(body: dict[str, Any]) -> dict[str, Any]:
    """`tools` and `tool_choice` as a chat has them."""
    tools = [
        _function(tool, f"tools[{number}]")
        for number, tool in enumerate(read_field(body, "tools", list, []))
    ]
    fields: dict[str, Any] = {"tools": tools}
    choice = read_optional(body, "tool_choice", dict)
    if choice is None:
        return fields
    choice_type = choice.get("type")
    if choice_type in ("any", "tool") and not tools:
        raise bad_request(f"tool_choice of type {choice_type} needs tools", "tool_choice")
    if choice_type == "tool":
        name = read_field({"tool_choice.name": choice.get("name")}, "tool_choice.name", str, "")
        fields["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(choice_type, str) and choice_type in CHOICES:
        fields["tool_choice"] = CHOICES[choice_type]
    else:
        raise bad_request(
            f"tool_choice.type must be auto, any, tool or none, got {describe(choice_type)}",
            "tool_choice",
        )
    name = "tool_choice.disable_parallel_tool_use"
    single = read_field({name: choice.get("disable_parallel_tool_use")}, name, bool, False)
    return fields | {"parallel_tool_calls": not single}


def _function(tool: Any, place: str) -> dict[str, Any]:
    """A tool as a chat has it; tools that Anthropic's servers or models know themselves are
    refused by name."""
    if not isinstance(tool, dict):
        raise bad_request(f"{place} must be an object, got {describe(tool)}", place)
    if tool.get("type") not in (None, "custom"):
        raise bad_request(
            f"{place} has the type {describe(tool['type'])}, which this server does not have; "
            "send tools with name and input_schema",
            place,
            "unsupported_parameter",
        )
    if tool.get("input_schema") is None:
        raise bad_request(
            f"{place}.input_schema is required: a JSON schema", f"{place}.input_schema"
        )
    function = {name: tool.get(name) for name in ("name", "description", "strict")}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def _thinking(body: dict[str, Any]) -> dict[str, Any]:
    """`thinking` as template arguments and a budget; without it, the model's own default holds."""
    thinking = read_optional(body, "thinking", dict)
    if thinking is None:
        return {}
    mode = thinking.get("type")
    if not isinstance(mode, str) or mode not in THINKING:
        raise bad_request(
            f"thinking.type must be one of {', '.join(THINKING)}, got {describe(mode)}", "thinking"
        )
    fields: dict[str, Any] = {"include_reasoning": thinking.get("display") != "omitted"}
    if mode == "enabled":
        fields["thinking_token_budget"] = _budget(thinking)
    on = THINKING[mode]
    if on is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": on, "thinking": on}
    return fields


def _budget(thinking: dict[str, Any]) -> int:
    name = "thinking.budget_tokens"
    value = thinking.get("budget_tokens")
    if value is None:
        raise bad_request(f"{name} is required where thinking is enabled", name)
    budget = read_field({name: value}, name, int, 0)
    if budget < 1:
        raise bad_request(f"{name} must be an integer from 1, got {budget}", name)
    return budget


def _output(body: dict[str, Any]) -> dict[str, Any]:
    """`output_config` (effort, format); `output_format` is the older name of its format."""
    config = read_field(body, "output_config", dict, {})
    forms = [form for form in (config.get("format"), body.get("output_format")) if form is not None]
    fields: dict[str, Any] = {"reasoning_effort": config.get("effort")}
    for form in forms:
        if not isinstance(form, dict) or form.get("type") != "json_schema" or "schema" not in form:
            raise bad_request(
                'output_config.format must be {"type": "json_schema", "schema": object}',
                "output_config.format",
            )
        wrapped = {"name": "output", "schema": form["schema"]}
        fields["response_format"] = {"type": "json_schema", "json_schema": wrapped}
    return fields
