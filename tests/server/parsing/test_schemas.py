"""Schemas mean in every format what they mean in JSON: arguments are read with their types, and
grammars allow what follows them, nothing else, and never lead where nothing can follow."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.server.parsing.registry import tool_formats
from tests.server.parsing.feeding import cut, fed, meant
from tests.server.parsing.samples import produced
from tests.server.parsing.schemas import Walker, arguments, ends_of, job_of

FORMATS = sorted(tool_formats())
RAW = ("function_gemma", "glm45", "minimax_m2", "qwen3_coder", "seed_oss")
OTHERS = ("llama4_pythonic", "pythonic")
EXAMPLES = pytest.mark.parametrize("examples", [25, pytest.param(1_500, marks=pytest.mark.slow)])
# Reasons of formats that write no JSON, where JSON can hold what they cannot
OF_FORMATS = ("format of tool calls", "which only JSON formats can follow")


def thorough(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def read(name: str, schema: Any, text: str, positions: list[int] | None = None) -> Any:
    """The arguments of the call of f in a text."""
    parser = tool_formats()[name]({"f": schema})
    ((called, found),) = meant(fed(parser, cut(text, positions or [])))
    assert called == "f"
    return found


def whole_call(name: str, schema: Any, wanted: Any) -> str:
    """A call of f as the format writes it."""
    parser = tool_formats()[name]
    call = produced(parser.pieces("f", schema, 0), iter([wanted]))
    return parser.section.begin + call + parser.section.end


def follows(value: Any, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


@EXAMPLES
@pytest.mark.parametrize("name", RAW + OTHERS)
def test_arguments_are_read_as_they_were_meant(name: str, examples: int) -> None:
    @thorough(examples)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        schema, found = data.draw(arguments())
        wanted = data.draw(found)
        assert follows(wanted, schema), "the test's own value"
        text = whole_call(name, schema, wanted)
        assert read(name, schema, text, data.draw(st.lists(st.integers(0, 200)))) == wanted

    holds()


@EXAMPLES
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", RAW + OTHERS)
def test_every_walk_along_a_grammar_ends_in_arguments_that_follow_the_schema(
    name: str, special: bool, examples: int
) -> None:
    parser = tool_formats()[name]
    walker = Walker(parser.special if special else ())
    plain = Walker()

    @thorough(examples)
    @given(arguments().map(lambda drawn: drawn[0]), st.integers(0, 2**32))
    def holds(schema: Any, seed: int) -> None:
        schema = schema | {"type": "object"}
        try:
            grammar = walker.grammar(job_of(parser, schema))
        except ValueError as error:
            if not any(reason in str(error) for reason in OF_FORMATS):
                with pytest.raises(ValueError):
                    plain.grammar({"kind": "json", "value": schema, "whitespace": None})
            return
        for number in range(3):
            text = walker.walk(grammar, seed + number, ends_of(parser.pieces("f", schema, 0)))
            assert follows(read(name, schema, text), schema), text

    holds()
