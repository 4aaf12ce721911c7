"""Demanded and strict calls follow the schema of their arguments in every format, whatever the
model would rather say, or the request is a 400 before the first token, as docs/answers.md says."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from jaxllm.server.parsing.formats import find_formats
from tests.server.answers.replies import whole
from tests.server.answers.speaker import ScriptedServer
from tests.server.answers.worlds import WORLDS
from tools.answer_matrix import WITHOUT_MARKER
from tools.argument_schemas import argument_schemas, verdicts

SCHEMAS = argument_schemas()
# One format of each way to write arguments
KINDS = ("hermes", "qwen3_coder", "glm45", "pythonic", "function_gemma")
# A model that means well, one that says what comes to its mind, and ones that would break out
WISHES = (
    {"value": "celsius", "unit": "celsius", "a": 3, "b": 4, "x": 1.5},
    {},
    {"value": None, "unit": "kelvin", "extra": [1, {"a": '"}], </parameter><escape>'}]},
    {"value": -12345.75, "node": {"name": "}{"}, "days": "many"},
)


def check_schema(server: ScriptedServer, name: str, words: str, wish: int, strict: bool) -> None:
    """Hold the server to a schema in a format, for a model that would say other arguments."""
    world, schema = WORLDS[name], SCHEMAS[words]
    server.server_state.formats = find_formats("none", name, None)
    server.control.wish = world.calls([("set", WISHES[wish])])
    function = {"name": "set", "parameters": schema} | ({"strict": True} if strict else {})
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto" if strict else "required",
        "chat_template_kwargs": {"opening": f"{name}-closed"},
    }
    answer = server.post("/v1/chat/completions", body)
    if not VERDICTS[name][words]:
        assert answer.status == 400 and answer.error["param"], answer.body
        return
    said = whole(answer)
    assert strict or said.calls
    checks = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for called, arguments in said.calls:
        value: Any = json.loads(arguments)
        assert called == "set" and isinstance(value, dict)
        checks.validate(value)


VERDICTS = verdicts()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("words", SCHEMAS)
def test_demanded_calls_follow_their_schema(
    servers: dict[bool, ScriptedServer], name: str, words: str
) -> None:
    number = (list(SCHEMAS).index(words) + KINDS.index(name)) % len(WISHES)
    check_schema(servers[True], name, words, number, strict=False)


@pytest.mark.slow
@pytest.mark.parametrize("wish", range(len(WISHES)))
@pytest.mark.parametrize("strict", [False, True], ids=["required", "strict"])
@pytest.mark.parametrize("name", sorted(WORLDS))
@pytest.mark.parametrize("words", SCHEMAS)
def test_all_bound_calls_follow_their_schema(
    servers: dict[bool, ScriptedServer], name: str, words: str, strict: bool, wish: int
) -> None:
    if strict and name in WITHOUT_MARKER:
        pytest.skip("nothing tells where calls begin")
    check_schema(servers[wish % 2 == 0], name, words, wish, strict)
