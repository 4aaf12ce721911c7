"""Tools of /v1/responses as functions, which is what chat templates know, and back.

A custom tool takes plain text: the model sees a function with one string. A namespace groups tools:
the model sees each under the joined name. Hosted tools run on OpenAI's servers, not here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from jaxllm.server.errors import ApiError, bad_request, describe
from jaxllm.server.requests.tools import MODES

INPUT = "input"  # the argument that carries a custom tool's text
HOSTED = frozenset(
    "web_search web_search_preview web_search_2025_08_26 web_search_preview_2025_03_11 "
    "file_search code_interpreter image_generation mcp computer computer_use_preview "
    "local_shell shell apply_patch tool_search programmatic_tool_calling".split()
)
_PLAIN_TEXT = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}

logger = logging.getLogger("jaxllm.server")


@dataclass(frozen=True, slots=True)
class Origin:
    """A tool as the request named it; `tool_type` is function or custom."""

    tool_type: str
    name: str
    namespace: str | None


@dataclass(slots=True)
class Tools:
    """The tools of a request.

    Attributes:
        functions: in the form of chats.
        places: of the functions in the body.
        origins: by the names in `functions`.
        declared: all functions by their names, also those that a choice leaves out.
        shown: as the request gave them, without hosted tools.
        hosted: types of the hosted tools, which are left out.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)
    declared: dict[str, dict[str, Any]] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)
    hosted: list[str] = field(default_factory=list)

    def add(self, tools: Any, place: str) -> None:
        """Add tools from the field at `place`. Raises ApiError(400)."""
        if tools is None:
            return
        if not isinstance(tools, list):
            raise bad_request(f"{place} must be a list, got {describe(tools)}", place)
        for number, tool in enumerate(tools):
            self._add(tool, f"{place}[{number}]")

    def check(self) -> None:
        """Refuse hosted tools that stand alone: the answer could not use any. Beside others they
        are left out, because agents always declare theirs. Raises ApiError(400)."""
        if self.hosted and not self.functions:
            raise not_hosted(self.hosted[0], "tools")
        if self.hosted:
            logger.debug("hosted tools were left out: %s", ", ".join(sorted(set(self.hosted))))

    def _add(self, tool: Any, place: str) -> None:
        tool_type = None
        if isinstance(tool, dict):
            tool_type = tool.get("type")
        if tool_type == "namespace":
            self._add_namespace(tool, place)
        elif tool_type in ("function", "custom"):
            self._declare(tool, place, None)
        elif is_hosted(tool_type):
            self.hosted.append(tool_type)
            return
        else:
            raise bad_request(
                f"{place} must be an object of type function, custom or namespace, "
                f"got {describe(tool if tool_type is None else tool_type)}",
                place,
            )
        self.shown.append(tool)

    def _add_namespace(self, tool: dict[str, Any], place: str) -> None:
        namespace = read_name(tool, place)
        members = tool.get("tools")
        if not isinstance(members, list):
            raise bad_request(
                f"{place}.tools must be a list, got {describe(members)}", f"{place}.tools"
            )
        for number, member in enumerate(members):
            where = f"{place}.tools[{number}]"
            if not isinstance(member, dict) or member.get("type") not in ("function", "custom"):
                raise bad_request(f"{where} must be an object of type function or custom", where)
            self._declare(member, where, namespace)

    def _declare(self, tool: dict[str, Any], place: str, namespace: str | None) -> None:
        """One tool that the client runs."""
        origin = Origin(tool["type"], read_name(tool, place), namespace)
        name = joined_name(origin.name, namespace)
        function: dict[str, Any] = {"name": name}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        if origin.tool_type == "custom":
            function |= _custom(tool, place)
        else:
            members = {key: tool.get(key) for key in ("parameters", "strict")}
            function |= {key: value for key, value in members.items() if value is not None}
        declared = {"type": "function", "function": function}
        if name in self.origins:
            if self.origins[name] == origin and self.declared[name] == declared:
                return  # agents repeat themselves
            raise bad_request(f"{place} is another tool of the name {describe(name)}", place)
        self.origins[name] = origin
        self.declared[name] = declared
        self.functions.append(declared)
        self.places.append(place)

    def choice(self, value: Any) -> Any:
        """`tool_choice` in the form of chats; allowed tools are those that stay. Raises
        ApiError(400)."""
        if value is None or value in MODES:
            return value
        choice_type = None
        if isinstance(value, dict):
            choice_type = value.get("type")
        if choice_type == "allowed_tools":
            return self._allow(value)
        if choice_type in ("function", "custom"):
            return {"type": "function", "function": {"name": self._find(value, "tool_choice")}}
        if is_hosted(choice_type):
            raise not_hosted(choice_type, "tool_choice")
        raise bad_request(
            "tool_choice must be none, auto, required, or an object of type function, custom or "
            f"allowed_tools, got {describe(value if choice_type is None else choice_type)}",
            "tool_choice",
        )

    def _allow(self, choice: dict[str, Any]) -> Any:
        """Keep the allowed tools only; the mode."""
        listed = choice.get("tools")
        mode = choice.get("mode", "auto")
        if not isinstance(listed, list) or mode not in ("auto", "required"):
            raise bad_request(
                "tool_choice of type allowed_tools must have a list of tools, "
                "and auto or required as its mode",
                "tool_choice",
            )
        allowed = {
            self._find(tool, f"tool_choice.tools[{number}]")
            for number, tool in enumerate(listed)
            if not isinstance(tool, dict) or not is_hosted(tool.get("type"))
        }
        kept = [
            (function, place)
            for function, place in zip(self.functions, self.places, strict=True)
            if function["function"]["name"] in allowed
        ]
        self.functions = [function for function, _ in kept]
        self.places = [place for _, place in kept]
        return mode

    def _find(self, tool: Any, place: str) -> str:
        """The name in `functions` of the tool that a choice names."""
        if not isinstance(tool, dict):
            raise bad_request(f"{place} must be an object, got {describe(tool)}", place)
        name = joined_name(read_name(tool, place), tool.get("namespace"))
        if name not in self.origins:
            raise bad_request(
                f"{place} names {describe(name)}, which is not among the tools", place
            )
        return name


def is_hosted(tool_type: Any) -> TypeGuard[str]:
    """Whether a tool of this type runs on OpenAI's servers."""
    return isinstance(tool_type, str) and tool_type in HOSTED


def joined_name(name: str, namespace: Any) -> str:
    """The name of a tool that the model sees."""
    if isinstance(namespace, str):
        return f"{namespace.rstrip('_')}__{name}"
    return name


def read_name(tool: dict[str, Any], place: str) -> str:
    """A tool's name. Raises ApiError(400)."""
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise bad_request(f"{place}.name must be a text, got {describe(name)}", f"{place}.name")
    return name


def not_hosted(tool_type: str, param: str) -> ApiError:
    """The refusal of a hosted tool."""
    return bad_request(
        f"{tool_type} is a hosted tool, which this server does not run; "
        "declare a function that your client runs",
        param,
        "unsupported_tool",
    )


def _custom(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """The function that stands for a custom tool."""
    form = tool.get("format")
    if form is None or (isinstance(form, dict) and form.get("type") == "text"):
        return {"parameters": _PLAIN_TEXT}
    if not isinstance(form, dict) or form.get("type") != "grammar":
        raise bad_request(f"{place}.format must be of type text or grammar", f"{place}.format")
    description = tool.get("description") or ""
    hint = f"The input follows this {form.get('syntax')} grammar:\n{form.get('definition')}"
    return {"parameters": _PLAIN_TEXT, "description": f"{description}\n\n{hint}".lstrip()}
