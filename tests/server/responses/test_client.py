"""openai-python's `responses` against the server: whole, streamed and parsed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from jaxllm.server.responses.sealed import unseal
from tests.server.harness import Running
from tests.server.responses.conftest import Script, prompt_of

ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "strict": False,
}
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def whole(client: openai.OpenAI, **body: Any) -> Any:
    """The response."""
    return client.responses.create(**({"model": "fake", "input": "hi"} | body))


def streamed(client: openai.OpenAI, **body: Any) -> Any:
    """What the client adds up from the events."""
    with client.responses.stream(**({"model": "fake", "input": "hi"} | body)) as stream:
        return stream.get_final_response()


BOTH = pytest.mark.parametrize("way", [whole, streamed])


@BOTH
def test_text_is_answered(client, script: Script, way):
    script("Hello.")
    response = way(client)
    assert response.output_text == "Hello."
    assert (response.status, response.object, response.model) == ("completed", "response", "fake")
    assert response.id.startswith("resp_")
    assert response.incomplete_details is None and response.error is None


@BOTH
def test_an_answer_thinks_speaks_and_calls(client, script: Script, way):
    script(THOUGHT + "I add.\n" + CALL + "\n" + CALL.replace("1", "2"))
    response = way(client, tools=[ADD])
    thought, text, one, two = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert text.content[0].text == "I add."
    assert [json.loads(call.arguments) for call in (one, two)] == [{"a": 1}, {"a": 2}]
    assert one.call_id != two.call_id
    assert (one.type, one.name, one.status) == ("function_call", "add", "completed")
    usage = response.usage
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


@BOTH
def test_an_answer_that_is_cut_short_is_incomplete(client, script: Script, way, server: Running):
    script("Hello, you.")
    if way is streamed:
        events = list(
            client.responses.create(model="fake", input="x", max_output_tokens=2, stream=True)
        )
        response = events[-1].response
        assert events[-1].type == "response.incomplete"
    else:
        response = way(client, max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "Hello,"
    assert response.output[0].status == "incomplete"


class Sum(pydantic.BaseModel):
    """A structured answer."""

    total: int


def test_an_answer_is_parsed_by_a_schema(client, script: Script, server: Running):
    script('{"total": 5}')
    response = client.responses.parse(model="fake", input="x", text_format=Sum)
    assert response.output_parsed == Sum(total=5)
    assert server.control.added[-1].grammar is not None
    with client.responses.stream(model="fake", input="x", text_format=Sum) as stream:
        assert stream.get_final_response().output_parsed == Sum(total=5)


def test_a_conversation_goes_on_by_its_id(client, script: Script, server: Running):
    script(THOUGHT + CALL)
    first = whole(client, tools=[ADD], instructions="Be brief.")
    call = first.output[-1]
    script("2")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "two"}
    second = whole(client, previous_response_id=first.id, input=[result])
    assert second.previous_response_id == first.id
    third = whole(client, previous_response_id=second.id, input="And?")
    prompt = prompt_of(server)
    assert "hi" in prompt and '[add {"a": 1}]' in prompt and "two" in prompt and "And?" in prompt
    assert "Be brief." not in prompt  # instructions are not carried over
    assert third.output_text == "2"


def test_a_conversation_goes_on_by_its_items(client, script: Script, server: Running):
    script(THOUGHT + "I add." + CALL)
    first = whole(client, tools=[ADD], store=False, include=["reasoning.encrypted_content"])
    assert unseal(first.output[0].encrypted_content) == "hm"
    items = [item.to_dict() for item in first.output]
    result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "two"}
    script("2")
    second = whole(client, input=[{"role": "user", "content": "hi"}, *items, result], store=False)
    assert second.output_text == "2"
    assert 'I add.[add {"a": 1}]' in prompt_of(server)


def test_references_stand_for_stored_items(client, script: Script, server: Running):
    script("Hello.")
    first = whole(client)
    reference = {"type": "item_reference", "id": first.output[0].id}
    whole(
        client,
        input=[{"role": "user", "content": "hi"}, reference, {"role": "user", "content": "x"}],
    )
    assert "Hello." in prompt_of(server)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        whole(client, input=[{"type": "item_reference", "id": "msg_0"}])


def test_log_probabilities_come_with_the_text(client, script: Script):
    script(THOUGHT + "Hello.", size=1)
    for way in (whole, streamed):
        response = way(client, include=["message.output_text.logprobs"], top_logprobs=2)
        found = response.output[-1].content[0].logprobs
        assert len(found) >= len("Hello.")
        assert len(found[0].top_logprobs) == 2
        assert response.top_logprobs == 2


def test_a_custom_tool_gets_plain_text(client, script: Script):
    patch = {"type": "custom", "name": "patch", "description": "Patches."}
    arguments = json.dumps({"input": "*** Begin\n+x"})
    script(f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>')
    for way in (whole, streamed):
        call = way(client, tools=[patch]).output[0]
        assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", "*** Begin\n+x")


def test_tools_of_a_namespace_are_called_by_their_own_names(client, script: Script):
    docs = {"type": "namespace", "name": "docs", "description": "x", "tools": [ADD]}
    script(CALL.replace("add", "docs__add"))
    for way in (whole, streamed):
        call = way(client, tools=[docs]).output[0]
        assert (call.name, call.namespace) == ("add", "docs")


def test_the_response_repeats_the_request(client, script: Script):
    script("x")
    response = whole(
        client,
        tools=[ADD, {"type": "web_search"}],
        metadata={"a": "b"},
        instructions="Be brief.",
        temperature=0.5,
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        max_output_tokens=50,
        truncation="auto",
        user="ann",
    )
    assert [tool.name for tool in response.tools] == ["add"]
    assert response.metadata == {"a": "b"}
    assert (response.instructions, response.temperature) == ("Be brief.", 0.5)
    assert response.parallel_tool_calls is False
    assert (response.reasoning.effort, response.reasoning.summary) == ("low", "auto")
    assert (response.max_output_tokens, response.truncation, response.user) == (50, "auto", "ann")
    assert response.text.format.type == "text"
