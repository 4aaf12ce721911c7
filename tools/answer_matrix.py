"""What a chat's answer may be, for every format of tool calls and every way to ask: the promises
that docs/api.md makes, as values. The tests of tests/server/answers hold the server to them, and
docs/answers.md shows them.
"""

from __future__ import annotations

from itertools import product
from typing import Literal, NamedTuple

from jaxllm.server.parsing.registry import tool_formats

Choice = Literal["auto", "required", "named", "none"]
CHOICES: tuple[Choice, ...] = ("auto", "required", "named", "none")

# Formats in which text may begin as calls do, so that a grammar cannot tell them apart
WITHOUT_MARKER = frozenset({"glm4", "llama3_json", "llama4_pythonic", "pythonic"})
# Formats whose constrained answers have one call: GLM 4 never writes two, Kimi K2 numbers its calls
ONE_CALL = frozenset({"glm4", "kimi_k2"})


class Request(NamedTuple):
    """What a request says of its answer.

    Attributes:
        choice: `tool_choice`.
        strict: one of the tools is strict.
        structure: a `response_format` with a JSON schema.
    """

    choice: Choice
    strict: bool
    structure: bool


class Cell(NamedTuple):
    """A request to a model of one format.

    Attributes:
        format: of tool calls, by its name.
        thinking: the model thinks before its answer; else its prompt has ended the thought, or it
            writes none.
        streamed: the reply is a stream.
    """

    format: str
    thinking: bool
    request: Request
    streamed: bool

    @property
    def name(self) -> str:
        """A short name for tests."""
        words = [self.format, self.request.choice]
        words += ["thinking"] * self.thinking + ["strict"] * self.request.strict
        words += ["schema"] * self.request.structure + ["streamed"] * self.streamed
        return "-".join(words)


class Promise(NamedTuple):
    """What holds of an answer, whatever the model would rather say.

    Attributes:
        refused: the request is a 400 before the first token.
        least_calls: how many calls the answer has at least.
        most_calls: and at most; None: any number.
        bound: only tools of the request are called, and arguments follow their schemas.
        text: what stands beside or in place of calls: anything, JSON of the structure where there
            is no call, or nothing.
    """

    refused: bool = False
    least_calls: int = 0
    most_calls: int | None = None
    bound: bool = False
    text: Literal["anything", "structure", "nothing"] = "anything"

    @property
    def words(self) -> str:
        """A cell of the page's table."""
        if self.refused:
            return "400"
        follow = "that follows its schema" if self.most_calls == 1 else "that follow their schemas"
        arguments = f" {follow}" if self.bound else ""
        if self.most_calls == 0:
            return "text of the structure" if self.text == "structure" else "text, calls included"
        if self.text == "nothing":
            return f"{'one call' if self.most_calls == 1 else 'calls'}{arguments}"
        if self.text == "structure":
            return f"calls{arguments}, or text of the structure"
        return f"text and calls{arguments}"


def promise(name: str, request: Request) -> Promise:
    """What docs/api.md promises of a request to a model of the format `name`."""
    marker = name not in WITHOUT_MARKER
    if request.choice == "none":
        return Promise(most_calls=0, text="structure" if request.structure else "anything")
    if request.choice == "named":
        return Promise(least_calls=1, most_calls=1, bound=True, text="nothing")
    most = 1 if name in ONE_CALL else None
    if request.choice == "required":
        return Promise(least_calls=1, most_calls=most, bound=True, text="nothing")
    if request.structure:
        if not marker:
            return Promise(refused=True)
        return Promise(most_calls=most, bound=True, text="structure")
    if request.strict and marker:
        return Promise(most_calls=most, bound=True)
    return Promise()


def cells() -> list[Cell]:
    """Every cell of the matrix."""
    switch = (True, False)
    requests = [Request(*values) for values in product(CHOICES, switch, switch)]
    return [Cell(*values) for values in product(sorted(tool_formats()), switch, requests, switch)]
