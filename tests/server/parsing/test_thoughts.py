"""A thought that was never closed may end with calls; what is no such call stays thought."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.server.parsing.parts import Part, Reasoning, Text, ToolStart, merged
from jaxllm.server.parsing.pipeline import Pipeline, pipeline
from jaxllm.server.parsing.registry import reasoning_formats, tool_formats
from tests.server.parsing.feeding import cut, fed, meant, reasoning, reply
from tests.server.parsing.samples import PARIS_TWICE, SAMPLES, TOOLS, WITHOUT_ARGUMENTS
from tests.server.parsing.test_laws import CUTS, EXAMPLES, WORD, numbered, thorough, visible

TOOL_FORMATS = sorted(set(SAMPLES) - {"gpt_oss"})  # which reads thoughts itself
ONLY_CALLS = {
    name: [
        sample
        for sample in SAMPLES[name]
        if sample.calls and not sample.reply and all(tool in TOOLS for tool, _ in sample.calls)
    ]
    for name in TOOL_FORMATS
}
PAIRS = list(itertools.product(sorted(reasoning_formats()), TOOL_FORMATS))


def new(thought: str, tools: str, prompt: str = "") -> Pipeline:
    return pipeline(reasoning_formats()[thought], tool_formats()[tools], prompt, TOOLS)


def alike(parts: list[Part]) -> list[str]:
    """Parts without the ids that were made."""
    return [re.sub(r"id='\w*'", "id", repr(part)) for part in parts]


def begun(thought: str) -> str:
    """What begins a thought."""
    return reasoning_formats()[thought].starts[0]


@pytest.mark.parametrize(("thought", "tools"), PAIRS)
def test_calls_that_end_an_open_thought_are_calls(thought: str, tools: str):
    assert ONLY_CALLS[tools]
    for sample, behind in itertools.product(ONLY_CALLS[tools], ["", "\n", " \n\n\n "]):
        text = f"{begun(thought)}Hm.\n{sample.text}{behind}"
        parts = fed(new(thought, tools), [text])
        assert (reasoning(parts), meant(parts), reply(parts)) == ("Hm.", sample.calls, "")
        assert alike(fed(new(thought, tools), text)) == alike(parts)


@pytest.mark.parametrize(("thought", "tools"), PAIRS)
def test_calls_are_thought_if_text_or_the_end_of_the_thought_follows(thought: str, tools: str):
    end = reasoning_formats()[thought].ends[0]
    for sample, behind in itertools.product(ONLY_CALLS[tools], ["Or not.", end, end + "No."]):
        inside = f"Hm.\n{sample.text}\n" + behind.partition(end)[0]
        text = f"{begun(thought)}Hm.\n{sample.text}\n{behind}"
        parts = fed(new(thought, tools), [text])
        assert meant(parts) == []
        assert reasoning(parts).rstrip("\n") == inside.rstrip("\n")
        assert reply(parts) == behind.partition(end)[2]
        assert alike(fed(new(thought, tools), text)) == alike(parts)


@pytest.mark.parametrize("tools", TOOL_FORMATS)
def test_no_cut_in_two_changes_what_a_thought_with_calls_means(tools: str):
    for sample, behind in itertools.product(ONLY_CALLS[tools], ["", "</think>", " x"]):
        text = f"<think>\na\n\n{sample.text}\n{behind}"
        whole = alike(fed(new("qwen3", tools), [text]))
        for at in range(1, len(text)):
            assert alike(fed(new("qwen3", tools), cut(text, [at]))) == whole


@pytest.mark.parametrize("tools", TOOL_FORMATS)
def test_nothing_of_a_call_is_told_before_the_answer_ends(tools: str):
    for sample in ONLY_CALLS[tools]:
        choice = new("qwen3", tools, "<think>\n")
        parts = [part for char in f"Hm.\n{sample.text}\n" for part in choice.feed(char)]
        assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == "Hm."
        assert not choice.called and choice.thinking
        assert not any(isinstance(part, ToolStart) for part in parts)
        assert any(isinstance(part, ToolStart) for part in choice.finish())
        assert choice.called and not choice.thinking


@pytest.mark.parametrize("tools", TOOL_FORMATS)
def test_a_call_that_breaks_off_within_a_thought_stays_thought(tools: str):
    for sample in SAMPLES[tools][:2]:
        for end in range(len(sample.text)):
            text = sample.text[:end]
            parts = fed(new("qwen3", tools, "<think>\n"), [text])
            made = meant(parts)
            assert made == sample.calls[: len(made)]
            if not made:
                assert reasoning(parts) == text.lstrip("\n")


UNKNOWN = '<tool_call>{"name": "none", "arguments": {}}</tool_call>'
KNOWN = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "thought", "calls"),
    [
        (UNKNOWN, UNKNOWN, 0),
        (UNKNOWN + KNOWN, UNKNOWN, 1),
        (KNOWN + UNKNOWN, KNOWN + UNKNOWN, 0),
        (f"I could {KNOWN} but no. {KNOWN}", f"I could {KNOWN} but no. ", 1),
        (f"<tool_call>{KNOWN}", "<tool_call>", 1),
        (f"I use <tool_call> now.\n\n\n{KNOWN}\n{KNOWN}\n", "I use <tool_call> now.\n", 2),
        (f"<tool_call>[{PARIS_TWICE}, {WITHOUT_ARGUMENTS[0]}]", "", 2),
        (f"{KNOWN}, or {KNOWN}.", f"{KNOWN}, or {KNOWN}.", 0),
    ],
)
def test_a_thought_ends_with_calls_of_tools_that_are_there(text: str, thought: str, calls: int):
    parts = fed(new("qwen3", "hermes", "<think>\n"), [text])
    assert (reasoning(parts), len(meant(parts)), reply(parts)) == (thought, calls, "")


def test_an_answer_that_may_call_nothing_thinks_of_calls():
    parts = fed(pipeline(reasoning_formats()["qwen3"], tool_formats()["hermes"], "<think>"), KNOWN)
    assert parts == [Reasoning(KNOWN)]


def test_a_call_behind_a_thought_may_be_of_any_tool():
    parts = fed(new("qwen3", "hermes"), f"<think>a</think>{UNKNOWN}")
    assert meant(parts) == [("none", {})]


def pieces_of(tools: str) -> st.SearchStrategy[list[str]]:
    """Samples and their halves, markers and words that occur once."""
    whole = [sample.text for sample in SAMPLES[tools]]
    halves = [text[: len(text) // 2] for text in whole] + [text[len(text) // 2 :] for text in whole]
    markers = [*tool_formats()[tools].open, *tool_formats()[tools].close]
    others = ["\n", "\n\n", " ", "</think>", "<think>", "word", "word", "<", "}"]
    texts = st.one_of(*(st.sampled_from(some) for some in (whole, halves, [*markers, *others])))
    return st.lists(texts, max_size=8)


@EXAMPLES
@pytest.mark.parametrize("tools", TOOL_FORMATS)
def test_no_cut_changes_any_thought_and_no_word_of_it_is_lost(tools: str, examples: int):
    @thorough(examples)
    @given(pieces_of(tools), CUTS)
    def holds(pieces: list[str], positions: list[int]) -> None:
        text = numbered(pieces)
        whole = fed(new("qwen3", tools, "<think>"), [text])
        assert alike(fed(new("qwen3", tools, "<think>"), text)) == alike(whole)
        assert alike(fed(new("qwen3", tools, "<think>"), cut(text, positions))) == alike(whole)
        assert sorted(WORD.findall(visible(whole))) == sorted(WORD.findall(text))

    holds()


def test_a_long_call_within_a_thought_is_read_in_linear_time():
    body = "x = '<y>' [1] {2}\n" * 20_000
    text = f"<function=run.code-2>\n<parameter=code>\n{body}\n</parameter>\n</function>"
    parts = fed(new("qwen3", "qwen3_coder", "<think>\n"), cut(text, range(0, len(text), 4)))
    assert meant(parts) == [("run.code-2", {"code": body})]
    assert fed(new("qwen3", "llama3_json", "<think>\n"), cut(body, range(0, len(body), 4))) == [
        Reasoning(body)
    ]


@pytest.mark.parametrize(
    "unit", [KNOWN, KNOWN + " x", "<tool_call>", '<tool_call>{"name": "', "\n"]
)
def test_time_is_linear_in_the_length_of_a_thought(unit: str):
    def seconds(size: int) -> float:
        text = (unit * (size // len(unit) + 1))[:size]
        best = float("inf")
        for _ in range(2):
            choice = new("qwen3", "hermes", "<think>")
            begin = time.process_time()
            for piece in cut(text, range(0, size, 4)):
                choice.feed(piece)
            choice.finish()
            best = min(best, time.process_time() - begin)
        return best

    assert seconds(32_000) < 64 * seconds(2_000) + 0.02


def test_text_of_a_thought_passes_at_once_but_for_what_may_be_a_call():
    choice = new("qwen3", "hermes", "<think>\n")
    for piece in ["Let", " me", " see: <b>", " {1} [2]"]:
        assert choice.feed(piece) == [Reasoning(piece)]
        clear = choice.clear
        assert clear is not None and not clear.hot(" then") and clear.hot("a <tool")
    assert choice.feed("<tool_call>") == []
    assert choice.clear is None
    assert merged(choice.feed(" x")) == [Reasoning("<tool_call> x")]
    assert choice.clear is not None
    assert choice.feed("</think>b") == [Text("b")]
