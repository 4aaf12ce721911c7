"""Conversations that the demo model's goldens cover: every feature of its chat template, and text
without a chat."""

from __future__ import annotations

import json
from typing import Any

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "City name"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "calculator", "arguments": {"expression": "47 * 83"}},
}
CALL_AS_TEXT = {
    "id": "c1",
    "type": "function",
    "function": {"name": "calculator", "arguments": '{"expression": "47 * 83"}'},
}


def user(content: Any) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    """An assistant's message."""
    return {"role": "assistant", "content": content, **more}


def chat(*messages: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Arguments of `apply_chat_template` for these messages."""
    return {"conversation": list(messages), **kwargs}


def result(content: str) -> dict[str, Any]:
    """A tool's message."""
    return {"role": "tool", "content": content}


def called(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """An assistant's message that calls these tools."""
    made = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return assistant(None, tool_calls=made)


BOOK_TABLE = {
    "type": "function",
    "function": {
        "name": "book_table",
        "description": "Book a table in a restaurant.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "people": {"type": "integer"},
                "time": {"type": "string"},
            },
            "required": ["city", "people", "time"],
        },
    },
}
READ_FILE = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "description": "Path of the file"}},
            "required": ["path"],
        },
    },
}
RUN_COMMAND = {
    "type": "function",
    "function": {
        "name": "run_command",
        "description": "Run a command in the shell.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
    },
    "required": ["name", "age", "city"],
}
FIND = user("Run the command that stands in notes/river.txt.")
CITIES_ASKED = user("What is the weather in Oslo and Bern?")
BOTH = user("Book a table in Rome for 4 people at 19:30. Also: what is the weather in Rome?")
AGENTS: dict[str, dict[str, Any]] = {
    "one call": chat(
        user("Book a table in Rome for 4 people at 19:30."), tools=[WEATHER, BOOK_TABLE]
    ),
    "parallel calls": chat(CITIES_ASKED, tools=[WEATHER, BOOK_TABLE]),
    "parallel calls of two tools": chat(BOTH, tools=[WEATHER, BOOK_TABLE]),
    "first of two calls": chat(FIND, tools=[READ_FILE, RUN_COMMAND]),
    "second of two calls": chat(
        FIND,
        called(("read_file", {"path": "notes/river.txt"})),
        result("wc -l photos/star.csv"),
        tools=[READ_FILE, RUN_COMMAND],
    ),
    "failed call": chat(
        FIND,
        called(("read_file", {"path": "notes/river.txt"})),
        result('{"error": "not found"}'),
        tools=[READ_FILE, RUN_COMMAND],
    ),
    "parallel results": chat(
        CITIES_ASKED,
        called(("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Bern"})),
        result("3 degrees and snowy"),
        result("9 degrees and cloudy"),
        tools=[WEATHER, BOOK_TABLE],
    ),
    "no tool fits": chat(user("Send an email to Zoe."), tools=[WEATHER]),
    "missing argument": chat(user("What is the weather?"), tools=[WEATHER]),
}


def in_xml(asked: dict[str, Any]) -> dict[str, Any]:
    """The conversation with calls in Qwen3-Coder's format."""
    return asked | {"tool_format": "xml"}


SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
CHATS: dict[str, dict[str, Any]] = {
    "greeting": chat(user("Hello!")),
    "sum": chat(user("What is 27 + 58?")),
    "system": chat(SYSTEM, user("98+76")),
    "who": chat(user("Who are you?")),
    "sort": chat(user("Sort these numbers: 42, 7, 99, 13")),
    "reverse": chat(user("Reverse the word banana.")),
    "json": chat(user("Give a JSON object with name and age for Maria, 34 years old.")),
    "too hard": chat(user("What is 47 * 83?")),
    "thinking": chat(user("What is 47 * 83?"), enable_thinking=True),
    "thinking about a sum": chat(SYSTEM, user("What is 86 + 57?"), enable_thinking=True),
    "several turns": chat(
        user("My name is Clara."), assistant("Nice to meet you, Clara!"), user("What is my name?")
    ),
    "thought of an earlier turn": chat(
        user("1 + 1"), assistant("2", reasoning_content="1 + 1 = 2."), user("Now add 3.")
    ),
    "thought inside content": chat(
        user("1 + 1"), assistant("<think>\n1 + 1 = 2.\n</think>\n\n2"), user("Now add 3.")
    ),
    "parts": chat(
        user([{"type": "text", "text": "What is "}, {"type": "text", "text": "12 + 13?"}])
    ),
    "tool": chat(user("What is 47 * 83?"), tools=[CALCULATOR]),
    "tool, thinking": chat(
        SYSTEM, user("What is 47 * 83?"), tools=[CALCULATOR], enable_thinking=True
    ),
    "two tools": chat(user("What's the weather in Paris and Rome?"), tools=[CALCULATOR, WEATHER]),
    "tool not needed": chat(user("Hello!"), tools=[CALCULATOR]),
    "tool answered": chat(
        user("What is 47 * 83?"),
        assistant(None, tool_calls=[CALL]),
        {"role": "tool", "tool_call_id": "c1", "content": "3901"},
        tools=[CALCULATOR],
    ),
    "arguments as text": chat(
        user("What is 47 * 83?"),
        assistant("", tool_calls=[CALL_AS_TEXT]),
        {"role": "tool", "content": "3901"},
        tools=[CALCULATOR],
    ),
    "two results": chat(
        user("Weather in Oslo and Bern?"),
        assistant(
            None,
            tool_calls=[
                {"function": {"name": "get_weather", "arguments": {"city": city}}}
                for city in ("Oslo", "Bern")
            ],
        ),
        {"role": "tool", "content": "3 degrees, snowy"},
        {"role": "tool", "content": "9 degrees, cloudy"},
        tools=[WEATHER],
    ),
    "empty content": chat(user(None)),
    "json to a schema": chat(
        user(
            f"Answer in JSON that follows this schema: {json.dumps(PERSON)}\n\n"
            "Maria is 34 years old and lives in Lyon."
        )
    ),
    **AGENTS,
    **{f"{name}, in XML": in_xml(asked) for name, asked in AGENTS.items()},
    "parallel calls, thinking": AGENTS["parallel calls"] | {"enable_thinking": True},
}
LINES = (
    "12 + 34 =",
    "99+1=",
    "The capital of France is",
    "Monday, Tuesday,",
    "Hello, my name is",
    "Once upon a time",
)
