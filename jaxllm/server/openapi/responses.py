"""JSON schemas of /v1/responses: bodies, from the tables that read them, and replies."""

from __future__ import annotations

from jaxllm.server.openapi.bodies import (
    CHAT_MEMBERS,
    IGNORED_FIELD,
    SCHEMA_OF_JSON,
    ignored,
    refused,
)
from jaxllm.server.openapi.replies import const, full
from jaxllm.server.openapi.schema import (
    ANY,
    BOOL,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    Schema,
    array,
    either,
    field,
    form,
    one_of,
    option,
    ref,
    unsupported,
)
from jaxllm.server.requests.conversation import EFFORTS
from jaxllm.server.requests.known_fields import IGNORED
from jaxllm.server.requests.tools import MODES
from jaxllm.server.responses import requests
from jaxllm.server.responses.compact import NOT_HERE
from jaxllm.server.responses.items import MAX_ITEMS
from jaxllm.server.responses.routes import LISTED, MAX_LISTED

KINDS: dict[type, Schema] = {str: STRING, int: INTEGER, dict: OBJECT}
METADATA: Schema = {
    "type": "object",
    "additionalProperties": {"type": "string", "maxLength": requests.MAX_VALUE},
    "propertyNames": {"maxLength": requests.MAX_KEY},
    "maxProperties": requests.MAX_METADATA,
}
FORMAT = form(
    ["type"],
    type=one_of(("text", "json_object", "json_schema")),
    name=field(STRING),
    schema=field(SCHEMA_OF_JSON),
)
MEMBERS: dict[str, Schema] = {
    **{name: CHAT_MEMBERS[name] for name in requests.SHARED},
    **refused(requests.NEUTRAL),
    **{
        name: unsupported(()) | {"description": f"Not supported here; send {here}."}
        for name, here in requests.RENAMED.items()
    },
    **ignored(IGNORED),
    **{
        name: field(KINDS[field_type], "Without effect.")
        for name, field_type in requests.PLAIN.items()
    },
    "input": field(either(STRING, array(OBJECT, maxItems=MAX_ITEMS)), "A text, or items."),
    "instructions": field(STRING, "What the system says first."),
    "previous_response_id": field(STRING, "The stored response that this one continues."),
    "store": field(BOOL, "Keep the response for later requests.", default=True),
    "background": field(BOOL, "Answer at once, and make the response behind.", default=False),
    "tools": field(array(OBJECT), "Tools of type function, custom or namespace."),
    "tool_choice": field(either(one_of(MODES), OBJECT), "Whether a tool is called."),
    "parallel_tool_calls": CHAT_MEMBERS["parallel_tool_calls"],
    "reasoning": field(
        form(
            effort=field(one_of(EFFORTS)),
            **dict.fromkeys(("summary", "generate_summary"), field(one_of(requests.SUMMARIES))),
        ),
        "How much to think, and whether thought is sent as its summary.",
    ),
    "text": field(form(format=field(FORMAT), verbosity=IGNORED_FIELD), "What the text must be."),
    "include": field(array(one_of(sorted(requests.INCLUDES))), "More members of the answer."),
    "truncation": field(one_of(("auto", "disabled")), "auto leaves out the oldest turns."),
    "max_output_tokens": option("max_tokens") | {"default": None},
    "top_logprobs": CHAT_MEMBERS["top_logprobs"],
    "metadata": field(METADATA, "Repeated in the response."),
}
ITEM_STATUS = one_of(("in_progress", "completed", "incomplete"))
PARTS = array(form(["type", "text"], type=STRING, text=STRING))
ERROR = full(code=STRING, message=STRING, param=field(STRING))
USAGE = full(
    input_tokens=INTEGER,
    input_tokens_details=full(cached_tokens=INTEGER, cache_write_tokens=INTEGER),
    output_tokens=INTEGER,
    output_tokens_details=full(reasoning_tokens=INTEGER),
    total_tokens=INTEGER,
)
# Members that repeat the request, or its defaults
REPEATED: dict[str, Schema] = {
    **dict.fromkeys(requests.REPEATED, ANY),
    "metadata": METADATA,
    "model": STRING,
    "parallel_tool_calls": BOOL,
    "reasoning": full(effort=field(STRING), summary=field(STRING)),
    "service_tier": STRING,
    "temperature": NUMBER,
    "text": OBJECT,
    "tool_choice": either(STRING, OBJECT),
    "tools": array(OBJECT),
    "top_logprobs": INTEGER,
    "top_p": NUMBER,
    "truncation": STRING,
}


def item(item_type: str, **members: Schema) -> Schema:
    """An item of the output."""
    return full(id=STRING, type=const(item_type), **members)


def called(item_type: str, field: str) -> Schema:
    """A call of a tool."""
    more = {"call_id": STRING, "name": STRING, field: STRING}
    return item(item_type, status=ITEM_STATUS, **more)


RETRIEVING: dict[str, Schema] = {
    "stream": BOOL | {"default": False},
    "starting_after": INTEGER | {"minimum": 0},
}
LISTING: dict[str, Schema] = {
    "limit": INTEGER | {"minimum": 1, "maximum": MAX_LISTED, "default": LISTED},
    "order": one_of(("asc", "desc")) | {"default": "desc"},
    "after": STRING,
}
BODIES: dict[str, Schema] = {
    "ResponsesRequest": form(**MEMBERS),
    "CompactRequest": form(**MEMBERS | ignored(NOT_HERE | requests.OF_ANSWERS)),
    "InputTokensRequest": form(**MEMBERS | ignored(NOT_HERE)),
}
REPLIES: dict[str, Schema] = {
    "Response": full(
        id=STRING,
        object=const("response"),
        created_at=INTEGER,
        completed_at=field(INTEGER),
        status=one_of(("queued", "in_progress", "completed", "incomplete", "failed", "cancelled")),
        background=BOOL,
        error=field(ERROR),
        incomplete_details=field(full(reason=const("max_output_tokens"))),
        output=array(ref("OutputItem")),
        usage=field(USAGE),
        store=BOOL,
        **REPEATED,
    ),
    "OutputItem": either(
        item("message", status=ITEM_STATUS, role=const("assistant"), content=PARTS),
        item("reasoning", status=ITEM_STATUS, summary=PARTS),
        called("function_call", "arguments"),
        called("custom_tool_call", "input"),
        item("compaction", encrypted_content=STRING),
    ),
    "Compaction": full(
        id=STRING,
        object=const("response.compaction"),
        created_at=INTEGER,
        output=array(OBJECT),
        usage=USAGE,
    ),
    "InputTokens": full(object=const("response.input_tokens"), input_tokens=INTEGER),
    "DeletedResponse": full(id=STRING, object=const("response"), deleted=const(True)),
    "InputItems": full(
        object=const("list"),
        data=array(OBJECT),
        first_id=field(STRING),
        last_id=field(STRING),
        has_more=BOOL,
    ),
}
