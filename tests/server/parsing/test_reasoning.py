"""Reasoning is told from the reply, wherever the text is cut."""

from __future__ import annotations

import pytest

from jaxllm.server.parsing.parts import Reasoning, Text
from jaxllm.server.parsing.registry import reasoning_formats
from tests.server.parsing.feeding import cut, fed

CASES = [
    ("qwen3", "", "<think>\nHm.\n\nSo.\n</think>\n\nHi\n", "Hm.\n\nSo.", "Hi\n"),
    ("qwen3", "…<think>\n", "Hm.\n</think>\n\nHi", "Hm.", "Hi"),
    ("qwen3", "…<think>\n\n</think>\n\n", "Hi <think>", "", "Hi <think>"),
    ("qwen3", "", "Hi </think> there", "", "Hi </think> there"),
    ("qwen3", "", "<think>\n\n</think>\n\nHi", "", "Hi"),
    ("qwen3", "", "<think>cut off <", "cut off <", ""),
    ("qwen3", "", "<thin", "", "<thin"),
    ("deepseek_r1", "", "Hm.\n</think>\n\nHi </think>", "Hm.", "Hi </think>"),
    ("deepseek_r1", "…<think>\n", "<think>\nHm.</think>Hi", "Hm.", "Hi"),
    ("deepseek_r1", "…</think>", "Hi", "", "Hi"),
    (
        "granite",
        "",
        "Here's my thought process: a Here b. Here is my response: c",
        " a Here b. ",
        " c",
    ),
    ("granite", "", "Here is the answer.", "", "Here is the answer."),
    ("mistral", "", "[THINK]a [b][/THINK]c", "a [b]", "c"),
    ("glm45", "", "\n<think>a</think>\nb", "a", "b"),
    ("glm45", "…<think></think>\n", "b", "", "b"),
    ("minimax_m2", "…<think>\n", "a\n</think>\n\nb", "a", "b"),
    ("seed_oss", "", "<seed:think>a</seed:think>b", "a", "b"),
    (
        "gpt_oss",
        "",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        "a",
        "b",
    ),
]


def test_every_format_has_cases():
    assert {case[0] for case in CASES} == set(reasoning_formats())


@pytest.mark.parametrize(("name", "prompt", "text", "thought", "reply"), CASES)
def test_reasoning_and_reply_are_told_apart_at_every_cut(name, prompt, text, thought, reply):
    parser = reasoning_formats()[name]
    wanted = [Reasoning(thought)] * bool(thought) + [Text(reply)] * bool(reply)
    assert fed(parser(prompt), [text]) == wanted
    assert fed(parser(prompt), text) == wanted
    for at in range(1, len(text)):
        assert fed(parser(prompt), cut(text, [at])) == wanted


def test_thinking_says_where_the_text_so_far_ends():
    parser = reasoning_formats()["qwen3"]("")
    states = []
    for piece in ["<think>", "a", "\n", "</think>", "b"]:
        parser.feed(piece)
        states.append(parser.thinking)
    assert states == [True, True, True, False, False]
