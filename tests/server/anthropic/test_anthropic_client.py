"""anthropic-sdk-python against the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.server.parsing.formats import Formats
from tests.server.anthropic.events import CUSTOM, script
from tests.server.harness import Running

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASKED: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 200,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": CUSTOM,
}


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """Its import takes seconds, which only who runs these tests spends."""
    return pytest.importorskip("anthropic")


@pytest.fixture
def client(server: Running, anthropic: Any) -> Iterator[Any]:
    """The official client."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client
    server.server_state.formats = Formats()
    server.control.pieces = []


def test_a_tool_is_called_and_its_result_answered(server: Running, client: Any) -> None:
    script(server, "<think>\nhm\n</think>\n\nLet me see.\n" + CALL)
    for stream in (False, True):
        if stream:
            with client.messages.stream(**ASKED) as events:
                message = events.get_final_message()
                assert events.request_id
        else:
            message = client.messages.create(**ASKED)
        thought, text, call = message.content
        assert (thought.thinking, text.text, call.name) == ("hm", "Let me see.", "get_weather")
        assert (call.input, message.stop_reason) == ({"city": "Paris"}, "tool_use")
        assert message.usage.output_tokens == len(server.control.pieces)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        history = [
            *ASKED["messages"],
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ]
        script(server, "It is sunny.")
        answer = client.messages.create(**ASKED | {"messages": history})
        assert answer.content[0].text == "It is sunny."
        script(server, "<think>\nhm\n</think>\n\nLet me see.\n" + CALL)


def test_texts_and_arguments_arrive_piece_by_piece(server: Running, client: Any) -> None:
    script(server, "Let me see what I can find.\n" + CALL)
    with client.messages.stream(**ASKED) as stream:
        found = list(stream)
    texts = [event.text for event in found if event.type == "text"]
    assert len(texts) > 3 and "".join(texts) == "Let me see what I can find."
    arguments = [event.partial_json for event in found if event.type == "input_json"]
    assert len(arguments) > 3 and "".join(arguments) == '{"city": "Paris"}'


def test_tokens_are_counted(client: Any, server: Running) -> None:
    script(server, "a")
    counted = client.messages.count_tokens(
        model="fake", messages=ASKED["messages"], tools=CUSTOM, system="Be brief."
    )
    assert counted.input_tokens > 20


def test_models_are_listed_in_the_clients_form(client: Any, server: Running) -> None:
    page = client.models.list()
    names = [card.id for card in page]
    assert (page.has_more, page.first_id, page.last_id) == (False, names[0], names[-1])
    for card in (*page.data, client.models.retrieve("fake")):
        assert type(card).model_validate(card.to_dict(mode="json")).display_name == card.id
        assert card.max_input_tokens == server.server_state.resolved.max_model_len


def test_errors_have_the_clients_types(client: Any, server: Running, anthropic: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**ASKED | {"model": "other", "tools": []})
    with pytest.raises(anthropic.BadRequestError, match="stop"):
        client.messages.create(**ASKED | {"stop_sequences": [""], "tools": []})
    server.control.error_delta = True
    try:
        with pytest.raises(anthropic.InternalServerError):
            client.messages.create(**ASKED | {"tools": []})
    finally:
        server.control.error_delta = False
