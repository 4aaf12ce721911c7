"""Held-out conversations with tools and schemas, and whether an answer is right, as the server's
parsers read it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from examples.demo_model.generate import Sample
from examples.demo_model.skills import errands, schemas
from examples.demo_model.tokenizer import render
from jaxllm.server.parsing.parts import Reasoning, Text, ToolArguments, ToolEnd, ToolStart
from jaxllm.server.parsing.pipeline import pipeline
from jaxllm.server.parsing.registry import find_reasoning, find_tools

PARSERS = {"json": "hermes", "xml": "qwen3_coder"}
SPARE_TOKENS = 48  # beyond the expected answer: a thought may be put in other words
Score = dict[str, dict[str, int]]


@dataclass
class Answer:
    """One answer of the assistant, as a client gets it.

    Attributes:
        calls: name and arguments of each call.
        thought: the reasoning; None if the answer has none.
        closed: no reasoning is left open.
    """

    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    thought: str | None = None
    closed: bool = True


@dataclass(frozen=True)
class SkillCase:
    """One scored prompt.

    Attributes:
        text: the expected answer as it is generated.
        schemas: of the tools' arguments, by name; None without tools.
        json: the content is a JSON value, which is compared as such.
    """

    task: str
    prompt: str
    text: str
    expected: Answer
    tool_format: str
    thinking: bool
    schemas: dict[str, Any] | None
    json: bool = False

    def score(self, text: str, scores: Score) -> bool:
        """Count an answer under its tasks; whether it is right."""
        answer = read(text, self.prompt, self.tool_format, self.schemas)
        if self.thinking:
            count(scores, "thought that begins and ends", answer.thought and answer.closed)
        if self.json:
            count(scores, "JSON to a schema: valid JSON", is_json(answer.content))
            right = same_json(answer.content, self.expected.content) and not answer.calls
        else:
            right = (answer.calls, answer.content) == (self.expected.calls, self.expected.content)
        right &= answer.closed and bool(answer.thought) == self.thinking
        count(scores, self.task, right)
        return right


def count(scores: Score, task: str, right: Any) -> None:
    """One more case of a task."""
    score = scores.setdefault(task, {"correct": 0, "total": 0})
    score["total"] += 1
    score["correct"] += bool(right)


def is_json(text: str) -> bool:
    """Whether a text is one JSON value."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def same_json(text: str, expected: str) -> bool:
    """Whether a text is JSON of the expected value, the order of its keys included."""
    return is_json(text) and json.dumps(json.loads(text)) == expected


def read(text: str, prompt: str, tool_format: str, tools: dict[str, Any] | None) -> Answer:
    """An answer as the server reads it."""
    one = pipeline(
        find_reasoning("qwen3", None), find_tools(PARSERS[tool_format], None), prompt, tools
    )
    parts = one.feed(text)
    answer = Answer(closed=not one.thinking)
    arguments: list[str] = []
    for part in [*parts, *one.finish()]:
        if isinstance(part, Text):
            answer.content += part.text
        elif isinstance(part, Reasoning):
            answer.thought = (answer.thought or "") + part.text
        elif isinstance(part, ToolStart):
            arguments = []
            answer.calls.append((part.name, None))
        elif isinstance(part, ToolArguments):
            arguments.append(part.text)
        elif isinstance(part, ToolEnd) and part.complete:
            answer.calls[-1] = (answer.calls[-1][0], json.loads("".join(arguments)))
    return answer


def cases_of(template: Any, name: str, sample: Sample, is_data: bool) -> Iterator[SkillCase]:
    """A case for each answer of a conversation."""
    tools = {
        tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools or ()
    }
    thinking = bool(sample.variables["enable_thinking"])
    tool_format = sample.variables.get("tool_format", "json")
    for i, message in enumerate(sample.messages):
        if message["role"] != "assistant":
            continue
        so_far = {"tools": sample.tools, "variables": sample.variables}
        prompt = render(
            template,
            Sample(sample.messages[:i], sample.tools, variables=sample.variables | GENERATE),
        )
        whole = render(template, Sample(sample.messages[: i + 1], **so_far))
        if not whole.startswith(prompt):
            raise ValueError(f"the template shows an answer otherwise than its prompt: {whole}")
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        yield SkillCase(
            task=task_of(name, sample, bool(calls), tool_format),
            prompt=prompt,
            text=whole[len(prompt) :].removesuffix("\n"),
            expected=Answer(message["content"], calls),
            tool_format=tool_format,
            thinking=thinking,
            schemas=tools if sample.tools else None,
            json=is_data,
        )


GENERATE = {"add_generation_prompt": True}


def task_of(name: str, sample: Sample, is_call: bool, tool_format: str) -> str:
    """The name of a case's task in the card."""
    if sample.tools is None:
        return f"JSON to a schema: {name}"
    if is_call:
        return f"calls in {tool_format.upper()}: {name}"
    return f"answers beside tools: {name}"


def skill_cases(template: Any, rng: random.Random, number: int) -> Iterator[SkillCase]:
    """Cases of `number` held-out conversations of each kind, a third of them with thoughts; tool
    calls of each kind in both formats."""
    for name, (errand, _) in errands.ERRANDS.items():
        for i in range(number):
            tool_format = sorted(PARSERS)[i % 2]
            draft = errands.cut(rng, errand(rng, True))
            sample = errands.finish(rng, draft, i % 3 == 2, tool_format)
            yield from cases_of(template, name, sample, is_data=False)
    for name, (maker, _) in schemas.MAKERS.items():
        for i in range(number):
            sample = schemas.finish(rng, maker(rng, True), i % 3 == 2)
            yield from cases_of(template, name, sample, is_data=True)
