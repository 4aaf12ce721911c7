"""The OpenAPI document of the server."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.routing import Route

import jaxllm
from jaxllm.server.anthropic.errors import is_messages_path
from jaxllm.server.middleware.auth import ADMIN_PATHS, is_open
from jaxllm.server.openapi import bodies, replies, responses
from jaxllm.server.openapi.schema import BOOL, STRING, Schema, array, one_of, ref

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
BYTES = "application/octet-stream"
PARTS = array(one_of(("weights", "kv_cache")), minItems=2, maxItems=2) | {"uniqueItems": True}
SCHEMAS = bodies.BODIES | responses.BODIES | replies.REPLIES | responses.REPLIES


@dataclass(frozen=True, slots=True)
class Operation:
    """What the document says of a path.

    Attributes:
        body: name of the body's schema.
        reply: name of the reply's schema.
        others: content types of replies that are no JSON document.
        query: parameters of the query.
    """

    summary: str
    body: str | None = None
    reply: str | None = None
    others: tuple[str, ...] = ()
    query: Mapping[str, Schema] = field(default_factory=dict)


# By path; those of one method begin with it
OPERATIONS = {
    "/v1/completions": Operation("Complete texts", "CompletionRequest", "Completion", (EVENTS,)),
    "/v1/chat/completions": Operation("Answer a chat", "ChatRequest", "ChatCompletion", (EVENTS,)),
    "/v1/completions/render": Operation(
        "The prompts of a completion, as token ids", "CompletionRequest", "RenderedCompletion"
    ),
    "/v1/chat/completions/render": Operation(
        "The prompt of a chat, as token ids", "ChatRequest", "RenderedChat"
    ),
    "/v1/messages": Operation(
        "Answer messages (Anthropic)", "MessagesRequest", "AnthropicReply", (EVENTS,)
    ),
    "/v1/messages/count_tokens": Operation(
        "Count the tokens of messages (Anthropic)", "CountTokensRequest", "TokenCount"
    ),
    "/v1/responses": Operation("Make a response", "ResponsesRequest", "Response", (EVENTS,)),
    "/v1/responses/compact": Operation("Compact a conversation", "CompactRequest", "Compaction"),
    "/v1/responses/input_tokens": Operation(
        "Count the tokens of a response's input", "InputTokensRequest", "InputTokens"
    ),
    "GET /v1/responses/{id}": Operation(
        "A stored response", None, "Response", (EVENTS,), responses.RETRIEVING
    ),
    "DELETE /v1/responses/{id}": Operation("Forget a response", reply="DeletedResponse"),
    "/v1/responses/{id}/cancel": Operation("Stop a response in the background", reply="Response"),
    "/v1/responses/{id}/input_items": Operation(
        "The input of a stored response", reply="InputItems", query=responses.LISTING
    ),
    "/generate": Operation(
        "Complete a text, in vLLM's or SGLang's form",
        "GenerateRequest",
        "Generated",
        (LINES, EVENTS),
    ),
    "/v1/embeddings": Operation("Vectors of inputs", "InputRequest", "Embeddings", (BYTES,)),
    "/v2/embed": Operation("Vectors of texts (Cohere)", "EmbedRequest", "CohereEmbeddings"),
    "/pooling": Operation("What the model makes of inputs", "InputRequest", "Pooled", (BYTES,)),
    "/classify": Operation("Classes of inputs", "InputRequest", "Classes"),
    **dict.fromkeys(
        ("/score", "/v1/score"), Operation("Scores of pairs of texts", "ScoreRequest", "Scores")
    ),
    **dict.fromkeys(
        ("/rerank", "/v1/rerank", "/v2/rerank"),
        Operation("Documents in the order of a query", "RerankRequest", "Ranking"),
    ),
    "/v1/models": Operation("The served names", reply="Models"),
    "/v1/models/{id}": Operation("One served name", reply="Model"),
    "/tokenize": Operation("Token ids of a text or a chat", "TokenizeRequest", "Tokens"),
    "/detokenize": Operation("The text of token ids", "DetokenizeRequest", "Text"),
    "/health": Operation("Whether the engine makes progress", reply="Health"),
    "/ping": Operation("Whether the engine makes progress", reply="Health"),
    "/ready": Operation("Whether new requests are accepted", reply="Ready"),
    "/version": Operation("The version", reply="Version"),
    "/metrics": Operation("Prometheus text"),
    "/start_profile": Operation("Begin a trace of the engine"),
    "/stop_profile": Operation("End the trace"),
    "/reset_prefix_cache": Operation(
        "Forget every cached prefix", query={"reset_running_requests": BOOL | {"default": False}}
    ),
    "/sleep": Operation(
        "Free device memory",
        query={
            "level": {"type": "string", "enum": ["1", "2"], "default": "1"},
            "mode": {"type": "string", "enum": ["abort", "wait"], "default": "abort"},
        },
    ),
    "/wake_up": Operation("Take the memory again", query={"tags": PARTS}),
    "/update_weights": Operation("Take the weights of another checkpoint", "UpdateWeights"),
    "/load": Operation("Requests that generate now", reply="Load"),
    **dict.fromkeys(
        ("/server_info", "/get_server_info"),
        Operation("What was decided at start", reply="ServerInfo"),
    ),
    "/is_sleeping": Operation("Whether the engine has given its memory back", reply="Sleeping"),
    "/kv_event_sources": Operation("Where KV events are published", reply="KVEventSources"),
    "/stats/stream": Operation("Statistics of the engine, as events", others=(EVENTS,)),
}


def document(routes: Iterable[Route], root_path: str = "") -> dict[str, Any]:
    """The document of these routes; those that OPERATIONS does not know have no schemas."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r":\w+}", "}", route.path)
        methods = sorted((route.methods or set()) - {"HEAD"})
        paths.setdefault(path, {}).update(
            {method.lower(): operation(method, path) for method in methods}
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxllm",
            "version": jaxllm.__version__,
            "description": "Null equals absence. Unknown fields are ignored, logged and counted.",
        },
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def operation(method: str, path: str) -> dict[str, Any]:
    """One method of one path."""
    known = OPERATIONS.get(f"{method} {path}") or OPERATIONS.get(path, Operation(path))
    error = "Error"
    if is_messages_path(path):
        error = "AnthropicError"
    contents: dict[str, Schema] = {}
    if known.reply is not None:
        contents[JSON] = {"schema": ref(known.reply)}
    # Without schemas: some read one as that of a stream's text, others as that of each event
    contents |= {media_type: {} for media_type in known.others}
    members: dict[str, Any] = {
        "summary": known.summary,
        "operationId": f"{method.lower()}{re.sub(r'[^0-9A-Za-z]+', '_', path).rstrip('_')}",
        "responses": {
            "200": {"description": "Done."} | ({"content": contents} if contents else {}),
            "default": {"description": "An error.", "content": {JSON: {"schema": ref(error)}}},
        },
        "security": [] if is_open(path) else [{"bearer": []}, {"x-api-key": []}],
    }
    if path in ADMIN_PATHS:
        members["description"] = "Takes the operator's key alone."
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": STRING}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in known.query.items()
    ]
    if parameters:
        members["parameters"] = parameters
    if known.body is not None:
        content = {JSON: {"schema": ref(known.body)}}
        members["requestBody"] = {"required": True, "content": content}
    return members
