"""Bodies of /v1/responses as typed requests: the body of a chat is made of them and read as one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxllm.server.errors import ApiError, bad_request, describe
from jaxllm.server.requests.body_fields import BodyFields
from jaxllm.server.requests.chat import ChatRequest, parse_chat
from jaxllm.server.requests.fields import read_field, read_optional
from jaxllm.server.requests.known_fields import IGNORED, refuse_unsupported
from jaxllm.server.requests.limits import Rules
from jaxllm.server.requests.sampling import WIRE_OPTIONS
from jaxllm.server.requests.structure import STRUCTURE_FIELDS
from jaxllm.server.responses.history import clipped
from jaxllm.server.responses.items import Chat, Item
from jaxllm.server.responses.store import Turn
from jaxllm.server.responses.tools import Origin, Tools

MAX_METADATA = 16
MAX_KEY = 64
MAX_VALUE = 512
LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
# The rest of what `include` may name belongs to hosted tools and images, which no answer has.
INCLUDES = frozenset(
    f"{LOGPROBS} {SEALED} file_search_call.results web_search_call.results "
    "web_search_call.action.sources message.input_image.image_url "
    "computer_call_output.output.image_url code_interpreter_call.outputs".split()
)
SUMMARIES = ("auto", "concise", "detailed")

# Fields of chats with the names of what stands for them here
RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "functions": "tools",
}
# Fields of features that are missing, with the values that request nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("conversation", "prompt", "moderation"), ()),
    "context_management": ([],),
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("use_beam_search", "echo"), (False,)),
    **dict.fromkeys(("prompt_logprobs", "truncate_prompt_tokens"), ()),
}
# Fields that a chat has too and that mean the same
SHARED = (
    *(name for name in WIRE_OPTIONS if name not in {*NEUTRAL, *RENAMED, "logprobs"}),
    *(name for name in STRUCTURE_FIELDS if name not in RENAMED),
    *("model", "stream", "stream_options", "chat_template", "chat_template_kwargs", "cache_salt"),
    *("thinking_token_budget", "include_reasoning", "documents"),
)
FIELDS = frozenset(
    {*SHARED, *NEUTRAL, *RENAMED, *IGNORED}
    | set(
        "input instructions previous_response_id store background tools tool_choice "
        "parallel_tool_calls reasoning text include truncation max_output_tokens max_tool_calls "
        "top_logprobs client_metadata prompt_cache_options".split()
    )
)
RESPONSES_BODY = BodyFields(
    sizes={"input": None, "instructions": None}, messages=frozenset({"input"})
)
# Members of a response that repeat the request, unless it says nothing
REPEATED = (
    "instructions metadata max_output_tokens max_tool_calls previous_response_id prompt_cache_key "
    "safety_identifier user"
).split()
# Fields that change nothing here
PLAIN: dict[str, type] = {
    **dict.fromkeys("user service_tier safety_identifier prompt_cache_key".split(), str),
    **dict.fromkeys(("prompt_cache_retention", "verbosity"), str),
    **dict.fromkeys(("client_metadata", "prompt_cache_options"), dict),
    "max_tool_calls": int,  # of hosted tools
}
# Fields about answers, which a summary is none of
OF_ANSWERS = frozenset({"tools", "tool_choice", "parallel_tool_calls", "text"})
_PLACE = re.compile(r"tools\[(\d+)\](?:\.function)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ChatRequest):
    """POST /v1/responses.

    Attributes:
        items: the input.
        before: the turn that it continues.
        shown: the members of the response that repeat the request.
        origins: the tools, by the names that the model sees.
        summarised: reasoning is sent as its summary.
        sealed: reasoning is sent in a form to be sent back, too.
        truncates: the oldest messages may be left out if all do not fit the context.
        compacts: the answer is a summary of the conversation.
    """

    items: list[Item]
    before: Turn | None
    shown: dict[str, Any]
    origins: Mapping[str, Origin]
    store: bool
    background: bool
    summarised: bool
    sealed: bool
    truncates: bool
    compacts: bool


@dataclass(frozen=True, slots=True)
class Context:
    """What a request means beside its own body.

    Attributes:
        items: all items before its input; `before` is the last turn of them.
        compacts: it asks for a summary of the conversation.
        counts: its tokens are counted, which may be more than the context holds.
    """

    before: Turn | None
    items: list[Item]
    compacts: bool = False
    counts: bool = False


def parse_response(
    body: dict[str, Any], items: list[Item], context: Context, rules: Rules
) -> ResponsesRequest:
    """The typed request; `items` is its input with references resolved. Raises ApiError that names
    the field at fault."""
    if context.compacts:
        body = {name: value for name, value in body.items() if name not in OF_ANSWERS}
    for name, here in RENAMED.items():
        if body.get(name) is not None:
            raise bad_request(f"{name} is not supported here; send {here}", name)
    refuse_unsupported(body, NEUTRAL)
    chat = read_chat(body, items, context)
    tools = chat.tools
    included = read_includes(body)
    reasoning = read_reasoning(body)
    shown = read_shown(body, tools, reasoning)
    truncates = shown["truncation"] == "auto" or context.compacts
    made = chat_body(body, chat, included, reasoning)
    if context.counts:
        made["truncate_prompt_tokens"] = -1
    if truncates:
        after = int(context.compacts)
        made["messages"] = clipped(made["messages"], rules.char_limit(False), after)
    request = as_chat(made, tools, rules)
    generation = request.generation
    structure = generation.structure
    if structure is not None and structure.field in RENAMED:
        generation = generation.with_structure_of(RENAMED[structure.field])
    params = generation.params
    shown |= {"temperature": params.temperature, "top_p": params.top_p}
    return ResponsesRequest(
        generation=generation,
        conversation=request.conversation,
        thinking_budget=request.thinking_budget,
        include_reasoning=request.include_reasoning,
        items=items,
        before=context.before,
        shown=shown | {"model": generation.model},
        origins=tools.origins,
        store=read_field(body, "store", bool, True),
        background=read_field(body, "background", bool, False),
        summarised=reasoning["summary"] is not None,
        sealed=SEALED in included,
        truncates=truncates,
        compacts=context.compacts,
    )


def read_chat(body: dict[str, Any], items: list[Item], context: Context) -> Chat:
    """The conversation and its tools. Raises ApiError."""
    tools = Tools()
    tools.add(body.get("tools"), "tools")
    chat = Chat(read_optional(body, "instructions", str), tools)
    for number, item in enumerate(context.items):
        chat.add(item, f"previous_response_id[{number}]")
    for number, item in enumerate(items):
        chat.add(item, f"input[{number}]")
    tools.check()
    if context.compacts:
        chat.summarise()
    return chat


def chat_body(
    body: dict[str, Any], chat: Chat, included: set[str], reasoning: dict[str, Any]
) -> dict[str, Any]:
    """The body of a chat that means the same. Raises ApiError(400)."""
    if not chat.messages:
        raise bad_request("input is required: a string or a list of items", "input")
    made = {name: body[name] for name in SHARED if body.get(name) is not None}
    made |= {
        "messages": chat.messages,
        "tool_choice": chat.tools.choice(body.get("tool_choice")),
        "parallel_tool_calls": body.get("parallel_tool_calls"),
        "max_completion_tokens": body.get("max_output_tokens"),
        "reasoning_effort": reasoning["effort"],
        "response_format": read_format(body),
    }
    made["tools"] = chat.tools.functions  # a choice may have left some out
    top = read_optional(body, "top_logprobs", int)
    if LOGPROBS in included or top:
        made |= {"logprobs": True, "top_logprobs": top}
    return made


def as_chat(body: dict[str, Any], tools: Tools, rules: Rules) -> ChatRequest:
    """The chat; errors name the fields of this endpoint."""
    try:
        return parse_chat(body, rules)
    except ApiError as error:
        raise_renamed(error, tools)


def raise_renamed(error: ApiError, tools: Tools) -> NoReturn:
    """Raise a chat's error with the names of this endpoint."""

    def place(match: re.Match[str]) -> str:
        return tools.places[int(match[1])]

    root = re.split(r"[.\[]", error.param or "")[0]
    here = RENAMED.get(root, error.param)
    message = error.message
    for name, new in RENAMED.items():
        if name == root or "_" in name:  # the others are words, too
            message = re.sub(rf"\b{name}\b", new, message)
    if root == "tools" and error.param is not None:
        here = _PLACE.sub(place, error.param)
        message = _PLACE.sub(place, message)
    error.message = message
    error.param = here
    raise error from None


def read_includes(body: dict[str, Any]) -> set[str]:
    """`include`. Raises ApiError(400)."""
    names = read_field(body, "include", list, [])
    for name in names:
        if not isinstance(name, str) or name not in INCLUDES:
            raise bad_request(
                f"include must name members of answers, got {describe(name)}; "
                f"known are {', '.join(sorted(INCLUDES))}",
                "include",
            )
    return set(names)


def read_reasoning(body: dict[str, Any]) -> dict[str, Any]:
    """`reasoning` with an effort and a summary, each None unless given. Raises ApiError(400)."""
    reasoning = read_field(body, "reasoning", dict, {})
    summary = reasoning.get("summary", reasoning.get("generate_summary"))
    if summary is not None and summary not in SUMMARIES:
        raise bad_request(
            f"reasoning.summary must be one of {', '.join(SUMMARIES)}, got {describe(summary)}",
            "reasoning.summary",
        )
    return {"effort": reasoning.get("effort"), "summary": summary}


def read_format(body: dict[str, Any]) -> dict[str, Any] | None:
    """`text.format` as `response_format` of chats. Raises ApiError(400)."""
    form = read_field(body, "text", dict, {}).get("format")
    if form is None:
        return None
    format_type = None
    if isinstance(form, dict):
        format_type = form.get("type")
    if format_type not in ("text", "json_object", "json_schema"):
        raise bad_request(
            "text.format must be an object of type text, json_object or json_schema, "
            f"got {describe(form if format_type is None else format_type)}",
            "text.format",
        )
    if format_type != "json_schema":
        return {"type": format_type}
    if not isinstance(form.get("name"), str) or form.get("schema") is None:
        raise bad_request(
            "text.format of type json_schema must have name and schema", "text.format"
        )
    return {"type": format_type, "json_schema": {"name": form["name"], "schema": form["schema"]}}


def read_shown(body: dict[str, Any], tools: Tools, reasoning: dict[str, Any]) -> dict[str, Any]:
    """The members of the response that repeat the request. Raises ApiError(400)."""
    truncation = read_field(body, "truncation", str, "disabled")
    if truncation not in ("auto", "disabled"):
        raise bad_request(
            f"truncation must be auto or disabled, got {describe(truncation)}", "truncation"
        )
    check_metadata(body)
    text = read_field(body, "text", dict, {})
    choice = body.get("tool_choice")
    for name, field_type in PLAIN.items():
        read_optional(body, name, field_type)
    return {
        **{name: body.get(name) for name in REPEATED},
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": read_field(body, "parallel_tool_calls", bool, True),
        "reasoning": reasoning,
        "service_tier": "default",
        "text": text | {"format": text.get("format") or {"type": "text"}},
        "tool_choice": "auto" if choice is None else choice,
        "tools": tools.shown,
        "top_logprobs": read_field(body, "top_logprobs", int, 0),
        "truncation": truncation,
    }


def check_metadata(body: dict[str, Any]) -> None:
    """Raises ApiError(400)."""
    for key, value in read_field(body, "metadata", dict, {}).items():
        if not isinstance(value, str) or len(value) > MAX_VALUE or len(key) > MAX_KEY:
            raise bad_request(
                f"metadata takes keys of {MAX_KEY} characters and texts of {MAX_VALUE} at most",
                "metadata",
            )
    if len(body.get("metadata") or ()) > MAX_METADATA:
        raise bad_request(f"metadata takes at most {MAX_METADATA} keys", "metadata")
