"""What holds whatever a model writes: no cut matters, nothing is lost, time is linear."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.server.parsing.parts import Part, Reasoning, Text, ToolArguments, ToolStart
from jaxllm.server.parsing.pipeline import pipeline
from jaxllm.server.parsing.registry import reasoning_formats, tool_formats
from tests.server.parsing.feeding import calls, cut, fed
from tests.server.parsing.samples import SAMPLES, TOOLS

FORMATS = sorted(SAMPLES)
PUNCTUATION = [*"<>{}[]()|=:,;\"'\\/`\n\t -.0é🎉\x00", "e5", "null", "True", "\\u00"]
# Longer than chance makes them in the nine characters of an id
WORD = re.compile(r"w\d+qxq")
EXAMPLES = pytest.mark.parametrize("examples", [40, pytest.param(2_000, marks=pytest.mark.slow)])


def thorough(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def outputs(name: str) -> st.SearchStrategy[str]:
    """Samples of a format, taken apart and put together otherwise, with words that occur once."""
    fragments = sorted(
        {
            fragment
            for sample in SAMPLES[name]
            for fragment in re.findall(r"<[^<>\s]*>|\[[A-Z_]+\]|\w+|\s+|.", sample.text)
        }
        | {marker[: len(marker) // 2] for marker in tool_formats()[name].open}
        | {"<think>", "</think>"}
    )
    whole = [sample.text for sample in SAMPLES[name]]
    halves = [text[at:] for text in whole for at in (len(text) // 3, len(text) // 2)]
    starts = [text[:at] for text in whole for at in (len(text) // 3, len(text) // 2)]
    pieces = st.one_of(
        st.sampled_from(fragments),
        st.sampled_from(PUNCTUATION),
        st.sampled_from(whole + halves + starts),
        st.just("word"),
        st.just("word"),
    )
    return st.lists(pieces, max_size=24).map(numbered)


def numbered(pieces: list[str]) -> str:
    return "".join(f"w{n}qxq" if piece == "word" else piece for n, piece in enumerate(pieces))


def visible(parts: list[Part]) -> str:
    """All that a client sees of an output."""
    shown = []
    for part in parts:
        if isinstance(part, Text | Reasoning | ToolArguments):
            shown.append(part.text)
        elif isinstance(part, ToolStart):
            id = part.id or ""
            shown.append(id if part.name in id else part.name + id)
    return "".join(shown)


CUTS = st.lists(st.integers(0, 400), max_size=8)


@EXAMPLES
@pytest.mark.parametrize("name", FORMATS)
def test_no_cut_changes_the_parts_of_any_output(name: str, examples: int):
    @thorough(examples)
    @given(outputs(name), CUTS)
    def holds(text: str, positions: list[int]) -> None:
        parser = tool_formats()[name]
        whole = fed(parser(TOOLS), [text])
        assert fed(parser(TOOLS), text) == whole
        assert fed(parser(TOOLS), cut(text, positions)) == whole
        calls(whole)

    holds()


@EXAMPLES
@pytest.mark.parametrize("name", FORMATS)
def test_no_word_of_any_output_is_lost_doubled_or_moved(name: str, examples: int):
    @thorough(examples)
    @given(outputs(name))
    def holds(text: str) -> None:
        # Arguments before a name come out behind it; every other word keeps its place.
        words = WORD.findall(visible(fed(tool_formats()[name](TOOLS), [text])))
        assert sorted(words) == sorted(WORD.findall(text))
        if '"arguments"' not in text:
            assert words == WORD.findall(text)

    holds()


@EXAMPLES
@pytest.mark.parametrize("name", sorted(reasoning_formats()))
def test_no_cut_changes_the_parts_of_a_pipeline(name: str, examples: int):
    @thorough(examples)
    @given(
        outputs("hermes"),
        st.sampled_from(["", *reasoning_formats()[name].starts]),
        st.sampled_from([*reasoning_formats()[name].ends, "<|tool_call|>"]),
        CUTS,
    )
    def holds(text: str, start: str, end: str, positions: list[int]) -> None:
        output = start + text[: len(text) // 2] + "!" + end + text[len(text) // 2 :]
        formats = reasoning_formats()[name], tool_formats()["granite"]
        own = [fed(pipeline(*formats, "", TOOLS), way) for way in ([output], output)]
        own.append(fed(pipeline(*formats, "", TOOLS), cut(output, positions)))
        plain = [[re.sub("call_[0-9a-f]{24}", "", repr(part)) for part in parts] for parts in own]
        assert plain[0] == plain[1] == plain[2]
        words = WORD.findall(visible(own[0]))
        assert sorted(words) == sorted(WORD.findall(output))

    holds()


HOSTILE = {
    "openers": lambda marker: marker,
    "half openers": lambda marker: marker[:-1],
    "newlines": lambda marker: "\n",
    "newlines inside": lambda marker: "\n\n \n",
    "brackets": lambda marker: "[",
    "braces": lambda marker: '{"a":',
    "digits": lambda marker: "1",
    "backslashes": lambda marker: "\\",
    "names": lambda marker: "get_weather",
    "quotes": lambda marker: '"',
    "commas": lambda marker: ", ",
    "tags": lambda marker: "<parameter=a>",
}


def seconds(name: str, start: str, unit: str, size: int) -> float:
    text = (start + unit * (size // len(unit)))[:size]
    pieces = [text[at : at + 4] for at in range(0, size, 4)]
    best = float("inf")
    for _ in range(2):
        parser = tool_formats()[name](TOOLS)
        begin = time.process_time()
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
        best = min(best, time.process_time() - begin)
    return best


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("name", FORMATS)
def test_time_is_linear_in_the_length_of_the_output(name: str, hostile: str):
    marker = (tool_formats()[name].open or ("get_time\n",))[0]
    sample = SAMPLES[name][0].text
    unit = HOSTILE[hostile](marker) or "["
    for start in ("", sample[: sample.find("Paris")]):
        # 16 times the text: 16 times the time, where a square would be 256
        assert seconds(name, start, unit, 16_000) < 64 * seconds(name, start, unit, 1_000) + 0.02


@pytest.mark.parametrize("name", FORMATS)
def test_calls_inside_each_other_without_end_are_text(name: str):
    text = (tool_formats()[name].open or ("",))[0] + '{"function":' * 2_000
    parser = tool_formats()[name](TOOLS)
    assert "".join(part.text for part in parser.feed(text) + parser.finish()) == text


def test_tags_that_open_no_parameter_cost_no_more_beside_many_parameters():
    text = "<tool_call>\n<function=f>\n<parameter=p0>" + "\n<parameter=" * 3_000

    def seconds_beside(count: int) -> float:
        declared = {f"p{number}": {"type": "string"} for number in range(count)}
        best = float("inf")
        for _ in range(2):
            parser = tool_formats()["qwen3_coder"]({"f": {"properties": declared}})
            begin = time.process_time()
            parser.feed(text)
            parser.finish()
            best = min(best, time.process_time() - begin)
        return best

    assert seconds_beside(4_000) < 10 * seconds_beside(4) + 0.1


@pytest.mark.parametrize(
    ("name", "start", "argument"),
    [
        ("function_gemma", "<start_function_call>call:f{", "a:1,"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n", "<parameter=a>\n1\n</parameter>\n"),
    ],
)
def test_a_schema_of_many_cases_is_not_taken_apart_for_each_value(
    name: str, start: str, argument: str
):
    cases = [{"anyOf": [{"properties": {f"p{at}": {}}} for at in range(15)]} for _ in range(2)]
    schema = {"properties": {"a": {"type": "integer"}}, "allOf": [*cases, *[{}] * 20]}
    parser = tool_formats()[name]({"f": schema})
    begin = time.process_time()
    parser.feed(start + argument * 3_000)
    parser.finish()
    assert time.process_time() - begin < 1
