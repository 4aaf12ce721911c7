"""Tools become functions that the model sees."""

from __future__ import annotations

import time
from typing import Any

import pytest

from jaxllm.server.errors import ApiError
from jaxllm.server.responses.tools import Origin, Tools

ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}}
DOCS = {
    "type": "namespace",
    "name": "mcp__docs__",
    "description": "Documents.",
    "tools": [{"type": "function", "name": "find"}, {"type": "custom", "name": "query"}],
}


def tools(*given: Any) -> Tools:
    made = Tools()
    made.add(list(given), "tools")
    made.check()
    return made


def names(made: Tools) -> list[str]:
    return [one["function"]["name"] for one in made.functions]


def test_functions_have_the_form_of_chats():
    made = tools(ADD | {"strict": True})
    function = {key: ADD[key] for key in ("name", "description", "parameters")} | {"strict": True}
    assert made.functions == [{"type": "function", "function": function}]
    assert made.shown == [ADD | {"strict": True}]


def test_a_schema_of_anything_stays_and_null_is_none():
    made = tools(ADD | {"parameters": {}}, {"type": "function", "name": "f", "parameters": None})
    assert [one["function"].get("parameters") for one in made.functions] == [{}, None]


def test_a_namespace_is_its_tools_under_joined_names():
    made = tools(ADD, DOCS)
    assert names(made) == ["add", "mcp__docs__find", "mcp__docs__query"]
    assert made.origins["mcp__docs__query"] == Origin("custom", "query", "mcp__docs__")


def test_a_custom_tool_is_a_function_of_one_text():
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    made = tools({"type": "custom", "name": "patch", "description": "Patches.", "format": grammar})
    function = made.functions[0]["function"]
    assert function["parameters"]["required"] == ["input"]
    assert function["description"].startswith("Patches.\n\n")
    assert "start: /.+/" in function["description"]


def test_hosted_tools_beside_others_are_left_out():
    made = tools(ADD, {"type": "web_search"})
    assert names(made) == ["add"]
    assert made.shown == [ADD]


def test_hosted_tools_alone_are_refused():
    with pytest.raises(ApiError, match="web_search is a hosted tool") as caught:
        tools({"type": "web_search"})
    assert caught.value.param == "tools"


def test_a_tool_may_be_repeated():
    assert names(tools(ADD, ADD)) == ["add"]


def test_no_tools_are_no_tools():
    made = Tools()
    made.add(None, "tools")
    made.check()
    assert made.functions == []


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("add", "tools"),
        (["add"], "tools[0]"),
        ([{"type": "unheard_of"}], "tools[0]"),
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "function", "name": ["x"]}], "tools[0].name"),
        ([ADD, ADD | {"description": "Subtracts."}], "tools[1]"),
        ([ADD, ADD | {"type": "custom"}], "tools[1]"),
        ([{"type": "namespace", "name": "x"}], "tools[0].tools"),
        ([{"type": "namespace", "name": "x", "tools": [DOCS]}], "tools[0].tools[0]"),
        ([{"type": "custom", "name": "x", "format": {"type": "json"}}], "tools[0].format"),
    ],
)
def test_bad_tools_are_refused_by_their_place(given, param):
    with pytest.raises(ApiError) as caught:
        Tools().add(given, "tools")
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("choice", [None, "none", "auto", "required"])
def test_plain_choices_stay(choice):
    assert tools(ADD).choice(choice) == choice


def test_a_choice_may_name_any_tool():
    made = tools(ADD, DOCS)
    function = {"type": "function", "name": "add"}
    assert made.choice(function) == {"type": "function", "function": {"name": "add"}}
    custom = {"type": "custom", "name": "query", "namespace": "mcp__docs__"}
    assert made.choice(custom)["function"]["name"] == "mcp__docs__query"


def test_allowed_tools_are_those_that_stay():
    made = tools(ADD, DOCS)
    allowed = [{"type": "function", "name": "add"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    assert made.choice(choice) == "required"
    assert names(made) == ["add"]
    assert "mcp__docs__find" in made.origins


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"type": "web_search"}, "hosted tool"),
        ({"type": "function", "name": "other"}, "not among the tools"),
        ({"type": "function"}, "name must be"),
        ({"type": "allowed_tools", "mode": "all", "tools": []}, "mode"),
        ({"type": "allowed_tools", "mode": "auto", "tools": ["add"]}, "must be an object"),
        ({}, "got a dict"),
        (5, "got 5"),
        ("sometimes", "type function, custom or"),
    ],
)
def test_bad_choices_are_refused(choice, words):
    with pytest.raises(ApiError, match=words) as caught:
        tools(ADD).choice(choice)
    assert caught.value.param.startswith("tool_choice")


def test_many_tools_are_read_in_linear_time():
    given = [{"type": "function", "name": f"f{n}"} for n in range(20_000)]
    began = time.process_time()
    assert len(tools(*given, *given).functions) == 20_000
    assert time.process_time() - began < 3  # each compared with all before: a minute


def test_an_allowed_tool_of_an_odd_type_is_refused():
    with pytest.raises(ApiError, match=r"tools\[0\].name must be a text"):
        tools(ADD).choice({"type": "allowed_tools", "tools": [{"type": []}]})
