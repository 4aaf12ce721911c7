"""Tags around a whole reply are taken off where the chat template has them, and nowhere else."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.server.parsing.formats import find_formats
from jaxllm.server.parsing.parts import Part, Reasoning, Text, ToolStart
from jaxllm.server.parsing.pipeline import Pipeline, pipeline
from jaxllm.server.parsing.wrappers import find_wrappers
from tests.server.parsing.feeding import cut, fed, meant, reply
from tests.server.parsing.samples import TOOLS
from tests.server.parsing.test_laws import CUTS, EXAMPLES, thorough

HUNYUAN = "{%- set content = content.split('<answer>')[1].split('</answer>')[0] %}<think></think>"
GRANITE = "within <think></think> and the final response between <response></response>"
CALL = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'


def new(template: str, prompt: str = "") -> Pipeline:
    formats = find_formats("auto", "hermes", template)
    return pipeline(
        formats.reasoning, formats.tools, prompt, TOOLS, wrappers=formats.wrappers
    )  # fmt: skip


def alike(parts: list[Part]) -> list[str]:
    return [re.sub("call_[0-9a-f]{24}", "", repr(part)) for part in parts]


@pytest.mark.parametrize(
    ("text", "answer", "calls"),
    [
        ("<answer>\nHi\n</answer>", "Hi", 0),
        (" \n\n<answer>Hi</answer>\n \n", "Hi", 0),
        ("<answer>Hi <b>a</b>", "Hi <b>a</b>", 0),
        ("<answer>\n\n</answer>", "", 0),
        ("<answer>a</answer> more", "a</answer> more", 0),
        ("<answer>a</answer>\n<answer>b</answer>", "a</answer>\n<answer>b</answer>", 0),
        ("<answer>a <answer>b</answer> c</answer>", "a <answer>b</answer> c", 0),
        ("So: <answer>a</answer>", "So: <answer>a</answer>", 0),
        ("<response>a</response>", "<response>a</response>", 0),
        ("  <answ", "  <answ", 0),
        ("<answer>a</answ", "a</answ", 0),
        ("  a", "  a", 0),
        (f"<answer>\nI look.\n</answer>\n{CALL}", "I look.", 1),
        (f"<answer>\nI look.\n{CALL}\n</answer>", "I look.", 1),
        (f"{CALL}<answer>a</answer>", "<answer>a</answer>", 1),
        (f"<answer>a</answer>{CALL}b</answer>", "ab</answer>", 1),
    ],
)
def test_only_the_tags_at_the_ends_of_an_answer_are_taken_off(text: str, answer: str, calls: int):
    for thought in ("", "<think>\nHm. <answer>\n</think>\n"):
        output = thought + text
        parts = fed(new(HUNYUAN), [output])
        assert (reply(parts), len(meant(parts))) == (answer, calls)
        if thought:
            assert parts[0] == Reasoning("Hm. <answer>")
        for at in range(1, len(output)):
            assert alike(fed(new(HUNYUAN), cut(output, [at]))) == alike(parts)
        assert alike(fed(new(HUNYUAN), output)) == alike(parts)


def test_tags_that_the_template_lacks_stay():
    for template, text in itertools.product(
        ["<think></think>", "<tool_response></tool_response><think>", GRANITE],
        ["<answer>a</answer>", "<think>b</think><answer>a</answer>"],
    ):
        assert reply(fed(new(template), text)) == "<answer>a</answer>"
    assert reply(fed(new(GRANITE), "<think>b</think><response>a</response>")) == "a"
    assert find_wrappers(GRANITE) == ("response",)
    assert find_wrappers(None) == ()


def test_a_model_whose_thoughts_stay_text_keeps_its_tags():
    assert find_formats("none", "auto", HUNYUAN).wrappers == ()
    # Its template has the tag around results of tools
    minimax = "<think> <minimax:tool_call> <response>{{ result }}</response>"
    assert find_formats("auto", "auto", minimax).wrappers == ()
    assert find_formats("auto", "auto", minimax + "<answer>").wrappers == ("answer",)
    assert find_formats("qwen3", "none", HUNYUAN).wrappers == ("answer",)


def test_text_within_tags_passes_at_once():
    choice = new(HUNYUAN, "<think>\n\n</think>\n")
    assert choice.feed("<answer>") == []
    for piece in ["Let", " me", " see: <b>"]:
        assert choice.feed(piece) == [Text(piece)]
        clear = choice.clear
        assert clear is not None and not clear.hot(" then")
        assert clear.hot("a </answ") and clear.hot("<tool_call>")
    assert choice.feed("</answer>") == choice.feed("\n") == choice.finish() == []


def test_without_tags_the_reply_is_as_fast_as_without_wrappers():
    choice = new(HUNYUAN, "<think>\n\n</think>\n")
    assert choice.feed("Plain") == [Text("Plain")]
    clear = choice.clear
    assert clear is not None and not clear.hot("</answer>")


PIECES = [
    "<answer>",
    "</answer>",
    "<answ",
    "\n",
    "\n\n",
    " ",
    "a",
    "<",
    CALL,
    "<think>",
    "</think>",
]


@EXAMPLES
def test_no_cut_changes_what_an_answer_with_tags_means(examples: int):
    @thorough(examples)
    @given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), CUTS)
    def holds(text: str, positions: list[int]) -> None:
        whole = fed(new(HUNYUAN), [text])
        assert alike(fed(new(HUNYUAN), text)) == alike(whole)
        assert alike(fed(new(HUNYUAN), cut(text, positions))) == alike(whole)
        assert sum(isinstance(part, ToolStart) for part in whole) == text.count(CALL) or (
            "<think>" in text
        )

    holds()
