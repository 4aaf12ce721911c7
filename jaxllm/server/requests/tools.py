"""The tools of a chat request, and how its answer may use them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxllm.server.errors import bad_request, describe
from jaxllm.server.requests.fields import check_json, is_one_of, read_field

MAX_TOOLS = 256
MAX_CHARS = 512 << 10  # of all tools of a request
MODES = ("none", "auto", "required")
ALLOWED = "allowed_tools"
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

A_SCHEMA = "a JSON schema, which is an object"
_NAME = re.compile(r"[\w.:/-]{1,128}").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of the arguments; by default there are none.
        strict: the arguments of a call must follow the schema.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] = field(default_factory=lambda: NO_ARGUMENTS)
    strict: bool = False

    @property
    def form(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.parameters}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request, and how the answer may use them.

    Attributes:
        mode: "none" forbids calls, "required" demands one.
        named: the only tool that may be called; then `mode` is "required".
        parallel: an answer may have several calls.
    """

    tools: tuple[Tool, ...] = ()
    mode: Literal["none", "auto", "required"] = "none"
    named: str | None = None
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.mode == "none":
            return ()
        return tuple(tool for tool in self.tools if self.named in (None, tool.name))

    @property
    def schemas(self) -> Mapping[str, dict[str, Any]] | None:
        """Schemas of the arguments of all tools, by name; None if none may be called."""
        if self.mode == "none":
            return None
        return {tool.name: tool.parameters for tool in self.tools}


NO_TOOLS = ToolUse()


def read_tool_use(body: dict[str, Any]) -> ToolUse:
    """`tools`, `tool_choice` and `parallel_tool_calls`; `[]` is no tools. Raises ApiError(400)."""
    _refuse_functions(body)
    parallel = read_field(body, "parallel_tool_calls", bool, True)
    listed = read_field(body, "tools", list, [])
    if len(listed) > MAX_TOOLS:
        raise bad_request(f"at most {MAX_TOOLS} tools per request, got {len(listed)}", "tools")
    check_json("tools", listed, MAX_CHARS)
    tools = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(listed))
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in names:
            raise bad_request(
                f"tools[{index}] has the name {tool.name} of an earlier tool; names must differ",
                f"tools[{index}].function.name",
            )
        names.add(tool.name)
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == ALLOWED:
        choice, names = _read_allowed(choice, names)
        tools = tuple(tool for tool in tools if tool.name in names)
    mode, named = _read_choice(choice, names)
    if not tools:
        return NO_TOOLS
    return ToolUse(tools=tools, mode=mode, named=named, parallel=parallel)


def _read_tool(tool: Any, place: str) -> Tool:
    """One tool; `place` is where it stands in the body, for errors."""
    if not isinstance(tool, dict):
        raise bad_request(f"{place} must be an object, got {describe(tool)}", place)
    if tool.get("type") != "function":
        raise bad_request(
            f"{place}.type must be function, got {describe(tool.get('type'))}", f"{place}.type"
        )
    function = tool.get("function")
    where = f"{place}.function"
    if not isinstance(function, dict):
        raise bad_request(f"{where} must be an object, got {describe(function)}", where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME(name):
        raise bad_request(
            f"{where}.name must be 1 to 128 letters, digits or characters of _ - . : /, "
            f"got {describe(name)}",
            f"{where}.name",
        )
    description = _read_member(function, where, "description", str, "a string")
    parameters = _read_member(function, where, "parameters", dict, A_SCHEMA)
    strict = _read_member(function, where, "strict", bool, "true or false")
    if parameters is None:
        parameters = NO_ARGUMENTS
    types = parameters.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise bad_request(
            f"{where}.parameters must be the schema of an object, got the type {describe(types)}",
            f"{where}.parameters",
        )
    return Tool(name=name, description=description, parameters=parameters, strict=bool(strict))


def _read_member[T](
    function: dict[str, Any], where: str, name: str, expected: type[T], must: str
) -> T | None:
    """A member of a function, which `must` be of this type or null. Raises ApiError(400)."""
    value = function.get(name)
    if value is not None and not isinstance(value, expected):
        raise bad_request(
            f"{where}.{name} must be {must}, got {describe(value)}", f"{where}.{name}"
        )
    return value


def _read_allowed(choice: dict[str, Any], names: set[str]) -> tuple[Any, set[str]]:
    """(mode, names) of a choice that leaves some of the tools out."""
    allowed = choice.get(ALLOWED)
    members = allowed if isinstance(allowed, dict) else {}
    mode = members.get("mode")
    listed = members.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise bad_request(
            f"tool_choice of type {ALLOWED} must have an object {ALLOWED} with a list of tools, "
            f"and auto or required as its mode, got {describe(allowed)}",
            "tool_choice",
        )
    where = f"tool_choice.{ALLOWED}.tools"
    return mode, {_name_of(tool, f"{where}[{index}]", names) for index, tool in enumerate(listed)}


def _read_choice(choice: Any, names: set[str]) -> tuple[Any, str | None]:
    """(mode, named tool) of `tool_choice` where these tools are there."""
    if choice is None:
        return "auto", None
    if not names and not is_one_of(choice, ("none", "auto")):
        raise bad_request(
            f"tool_choice must be none or auto when there are no tools, got {describe(choice)}",
            "tool_choice",
        )
    if isinstance(choice, str) and choice in MODES:
        return choice, None
    return "required", _name_of(choice, "tool_choice", names, "none, auto, required or ")


def _name_of(choice: Any, place: str, names: set[str], also: str = "") -> str:
    """The name of one of the tools in OpenAI's form; `also` says what else may be in its place."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice.get("type", "function") != "function":
        raise bad_request(
            f'{place} must be {also}{{"type": "function", "function": {{"name": …}}}}, '
            f"got {describe(choice)}",
            "tool_choice",
        )
    if name not in names:
        raise bad_request(
            f"{place} names {describe(name)}, which is none of the tools", "tool_choice"
        )
    return name


def _refuse_functions(body: dict[str, Any]) -> None:
    """Refuse the fields that came before tools, unless they request nothing."""
    for name, newer, neutral in (
        ("functions", "tools", ([],)),
        ("function_call", "tool_choice", ("none", "auto")),
    ):
        value = body.get(name)
        if value is not None and not is_one_of(value, neutral):
            raise bad_request(
                f"{name} is not supported here; send {newer}", name, "unsupported_parameter"
            )
