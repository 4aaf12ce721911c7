"""/openapi.json says what the server takes and answers."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route

from jaxllm.server.anthropic.requests import MESSAGES_FIELDS, parse_messages
from jaxllm.server.app import routes
from jaxllm.server.errors import ApiError, bad_request
from jaxllm.server.native.requests import SGLANG_FIELDS, parse_native
from jaxllm.server.openapi.bodies import BODIES
from jaxllm.server.openapi.document import OPERATIONS, SCHEMAS
from jaxllm.server.parsing.parts import Part, Reasoning, Text, ToolArguments, ToolEnd, ToolStart
from jaxllm.server.pooling.cohere import COHERE_FIELDS
from jaxllm.server.pooling.requests import INPUT_FIELDS
from jaxllm.server.pooling.scoring import RERANK_FIELDS, SCORE_FIELDS
from jaxllm.server.requests.chat import parse_chat
from jaxllm.server.requests.completion import parse_completion
from jaxllm.server.requests.known_fields import CHAT_FIELDS, COMPLETION_FIELDS, TOKENIZE_FIELDS
from jaxllm.server.requests.limits import Rules
from jaxllm.server.responses.create import NOTHING
from jaxllm.server.responses.items import read_input
from jaxllm.server.responses.output import Output, SummaryOutput
from jaxllm.server.responses.requests import FIELDS, ResponsesRequest, parse_response
from jaxllm.server.responses.tools import Origin
from tests.server.fake import RESOLVED
from tests.server.harness import Running, with_settings

RULES = Rules(resolved=RESOLVED, served=("fake",), longest_token=100)
USER = [{"role": "user", "content": "hi"}]


def parse_alone(body: dict[str, Any], rules: Rules) -> ResponsesRequest:
    """A response's body where none is stored."""
    if body.get("previous_response_id") is not None:
        raise bad_request("nothing is stored", "previous_response_id")
    return parse_response(body, read_input(body.get("input")), NOTHING, rules)


# schema -> fields of its body, how it is read, the least body
BODY: dict[str, tuple[Any, Callable[[Any, Rules], Any] | None, dict[str, Any]]] = {
    "CompletionRequest": (COMPLETION_FIELDS, parse_completion, {"prompt": "hi"}),
    "ChatRequest": (CHAT_FIELDS, parse_chat, {"messages": USER}),
    "MessagesRequest": (MESSAGES_FIELDS, parse_messages, {"messages": USER, "max_tokens": 5}),
    "ResponsesRequest": (FIELDS, parse_alone, {"input": "hi"}),
    "CompactRequest": (FIELDS, None, {"input": "hi"}),
    "InputTokensRequest": (FIELDS, None, {"input": "hi"}),
    "TokenizeRequest": (TOKENIZE_FIELDS, None, {"prompt": "hi"}),
    "InputRequest": (INPUT_FIELDS, None, {"input": "hi"}),
    "EmbedRequest": (COHERE_FIELDS, None, {"texts": ["hi"]}),
    "ScoreRequest": (SCORE_FIELDS, None, {"text_1": "a", "text_2": "b"}),
    "RerankRequest": (RERANK_FIELDS, None, {"query": "a", "documents": ["b"]}),
}
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 1.5, 2.0, 7, 1000, "", "hi", "fake", "auto", "none", "low", [], {},
    ["hi"], [""], [1], [[1]], [1, "hi"], [None], {"a": 1}, {"5": 1}, {"type": "auto"}, USER,
    {"type": "json_object"}, {"include_usage": True}, {"type": "enabled", "budget_tokens": 5},
]  # fmt: skip
# Values that a schema cannot tell from legal ones: they depend on the model or on other fields
DEPENDS = frozenset(
    "model prompt_logprobs logprobs top_logprobs stream_options best_of use_beam_search "
    "length_penalty early_stopping min_tokens priority tool_choice guided_whitespace_pattern "
    "continue_final_message add_generation_prompt suffix echo stop_token_ids allowed_token_ids "
    "logit_bias truncate_prompt_tokens structured_outputs guided_decoding guided_json guided_regex "
    "guided_choice guided_grammar structural_tag response_format output_config output_format "
    "chat_template_kwargs documents thinking tools messages system max_tokens input text "
    "previous_response_id".split()
)


@pytest.fixture(scope="module")
def document(server: Running) -> dict[str, Any]:
    """The document of the running server."""
    found: dict[str, Any] = server.get("/openapi.json").json()
    return found


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    """What checks values against a schema of the document."""
    return jsonschema.Draft202012Validator({"components": document["components"], **schema})


def test_every_schema_is_one_and_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert names <= schemas.keys()
    ids = [one["operationId"] for path in document["paths"].values() for one in path.values()]
    assert len(set(ids)) == len(ids)


def test_the_paths_are_the_routes(document: dict[str, Any], server: Running) -> None:
    actual: dict[str, set[str]] = {}
    for route in routes(server.server_state).routes:
        assert isinstance(route, Route)
        path = route.path.replace(":path", "")
        if not path.startswith(("/docs", "/openapi")):
            methods = {method.lower() for method in (route.methods or set()) - {"HEAD"}}
            actual[path] = actual.get(path, set()) | methods
    assert {path: set(methods) for path, methods in document["paths"].items()} == actual
    assert {name.split()[-1] for name in OPERATIONS} <= actual.keys()


@pytest.mark.parametrize("name", BODY)
def test_a_body_has_the_fields_that_the_server_knows(name: str) -> None:
    assert SCHEMAS[name]["properties"].keys() == BODY[name][0]


def test_the_two_forms_of_generate_have_their_fields() -> None:
    vllm, sglang = BODIES["GenerateRequest"]["anyOf"]
    assert vllm["properties"].keys() == COMPLETION_FIELDS
    assert sglang["properties"].keys() == SGLANG_FIELDS


def accepted(read: Callable[[Any, Rules], Any], body: dict[str, Any]) -> bool:
    """Whether a body is read without an error."""
    try:
        read(body, RULES)
    except ApiError:
        return False
    return True


@pytest.mark.parametrize("name", [name for name in BODY if BODY[name][1] is not None])
def test_a_schema_takes_what_the_server_takes(document: dict[str, Any], name: str) -> None:
    fields, read, least = BODY[name]
    assert read is not None
    check = validator(document, document["components"]["schemas"][name])
    for field in sorted(fields):
        for value in VALUES:
            body = least | {field: value}
            takes, says = accepted(read, body), check.is_valid(body)
            if takes:
                assert says, (field, value)
            elif field not in DEPENDS:
                assert not says, (field, value)


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        ({"text": "hi"}, True),
        ({"text": ["hi"], "sampling_params": {"n": 2}}, True),
        ({"input_ids": [[1]]}, True),
        ({"text": 5}, False),
        ({"text": "hi", "return_logprob": True}, False),
        ({"prompt": "hi", "temperature": 0.5}, True),
    ],
)
def test_the_schema_of_generate_takes_what_the_server_takes(
    document: dict[str, Any], body: dict[str, Any], taken: bool
) -> None:
    check = validator(document, document["components"]["schemas"]["GenerateRequest"])
    assert check.is_valid(body) is taken
    if taken:
        parse_native(body, RULES)
    else:
        with pytest.raises(ApiError):
            parse_native(body, RULES)


REQUESTS: dict[str, Any] = {
    "/v1/completions": {"prompt": "hi", "logprobs": 1},
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions/render": {"prompt": "hi"},
    "/v1/chat/completions/render": {"messages": USER},
    "/v1/messages": {"messages": USER, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/compact": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/generate": {"text": "hi"},
    "/tokenize": {"prompt": "hi", "return_token_strs": True},
    "/detokenize": {"tokens": [104]},
    "/v1/models": None,
    "/v1/models/{id}": None,
    "/health": None,
    "/ready": None,
    "/version": None,
}


@pytest.mark.parametrize("path", REQUESTS)
def test_replies_and_errors_are_as_the_document_says(
    document: dict[str, Any], server: Running, path: str
) -> None:
    method = "get" if REQUESTS[path] is None else "post"
    said = document["paths"][path][method]["responses"]
    concrete = path.replace("{id}", "fake")
    body = None if REQUESTS[path] is None else {"model": "fake"} | REQUESTS[path]
    reply = server.request(method.upper(), concrete, body)
    assert reply.status == 200
    check = validator(document, said["200"]["content"]["application/json"]["schema"])
    check.validate(reply.json())
    error = server.request("PATCH", concrete)
    validator(document, said["default"]["content"]["application/json"]["schema"]).validate(
        error.json()
    )


def test_stored_responses_are_as_the_document_says(
    document: dict[str, Any], server: Running
) -> None:
    id = server.post("/v1/responses", {"model": "fake", "input": "hi"}).json()["id"]
    path, paths = f"/v1/responses/{id}", document["paths"]
    for method, below in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        said = paths["/v1/responses/{id}" + below][method.lower()]["responses"]["200"]
        check = validator(document, said["content"]["application/json"]["schema"])
        check.validate(server.request(method, path + below).json())
    failed = {"code": "server_error", "message": "", "param": None}
    cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    whole = server.post("/v1/responses", {"model": "fake", "input": "hi"}).json()
    check = validator(document, {"$ref": "#/components/schemas/Response"})
    check.validate(whole | {"status": "failed", "error": failed, "usage": None})
    check.validate(whole | cut)


def test_items_of_responses_are_as_the_document_says(document: dict[str, Any]) -> None:
    check = validator(document, {"$ref": "#/components/schemas/OutputItem"})
    parts: list[Part] = [Reasoning("so"), Text("hi")]
    for number, tool in enumerate(("f", "c")):
        call = ToolArguments(number, '{"input": ""}')
        parts += [ToolStart(number, tool, f"call_{number}"), call, ToolEnd(number)]
    origins = {"f": Origin("function", "f", "space"), "c": Origin("custom", "c", None)}
    for summarised in (False, True):
        output = Output(origins, summarised, sealed=True)
        output.feed(parts)
        kinds = [item["type"] for item in output.items]
        assert kinds == ["reasoning", "message", "function_call", "custom_tool_call"]
        for item in output.items:
            check.validate(item)
    summary = SummaryOutput({}, False, False)
    summary.feed(parts)
    summary.finish(True)
    check.validate(summary.items[0])
    assert not check.is_valid(summary.items[0] | {"type": "image"})


def test_the_copy_in_docs_is_the_document(document: dict[str, Any], repo: pathlib.Path) -> None:
    copy = repo / "docs" / "openapi.json"
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    assert copy.read_text() == text, (
        "curl -s localhost:8000/openapi.json | "
        "python -m json.tool --indent 1 --no-ensure-ascii > docs/openapi.json"
    )


def test_the_page_loads_nothing_from_elsewhere(server: Running) -> None:
    page = server.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for name in re.findall(r'(?:href|src)="(?!openapi)([^"]+)"', page.body.decode()):
        file = server.get(f"/{name}")
        assert file.status == 200 and not re.search(rb"https?://(?!www.w3.org/)", file.body)
    assert server.get("/docs/../state.py").status == 404


@pytest.fixture
def without(tokenizer: Any) -> Iterator[Running]:
    """A server with --disable-fastapi-docs."""
    with Running(tokenizer, with_settings(docs=False)) as running:
        yield running


def test_a_flag_turns_both_off(without: Running) -> None:
    assert without.get("/docs").status == without.get("/openapi.json").status == 404
    assert without.get("/docs/docs.js").status == 404


def test_the_document_names_the_path_of_a_proxy(tokenizer: Any) -> None:
    with Running(tokenizer, root_path="/proxy") as running:
        assert running.get("/openapi.json").json()["servers"] == [{"url": "/proxy"}]
