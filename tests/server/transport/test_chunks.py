"""Tokens of a stream that are written as they come, without waking its task."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm.messages import TextDelta
from jaxllm.server.engine.streams import Stream
from jaxllm.server.openai.completion_reply import CompletionReply
from jaxllm.server.transport.connection import Chunks
from jaxllm.tokenizer import Tokenizer
from tests.server.stepped import Stepped

TOKEN = TextDelta(id="x", index=0, token_ids=[1], text="a")
PIECES = ["one ", "two ", "three ", "four ", "five"]
OPTIONS = ["none", "n", "logprobs"]
BODY = {"model": "fake", "prompt": "abcde", "max_tokens": 5, "stream": True}


@pytest.fixture
def stepped(tokenizer: Tokenizer) -> Iterator[Stepped]:
    """A server whose answers are PIECES, a step each."""
    with Stepped(tokenizer) as server:
        server.control.pieces = PIECES
        yield server


def test_what_comes_while_a_stream_waits_is_written_and_its_task_sleeps_on() -> None:
    async def seen() -> tuple[list[str], list[str], bool]:
        stream = Stream(lambda stream: None)
        stream.ids.add("x")
        written: list[str] = []
        takes = True

        def write(prompt: int, delta: TextDelta) -> bool:
            written.append(delta.text)
            return takes

        stream.write_at_once(write)
        stream.push(0, TOKEN, 1)  # nobody waits yet
        waiting = asyncio.ensure_future(stream.next_deltas())
        first = await waiting
        waiting = asyncio.ensure_future(stream.next_deltas())
        await asyncio.sleep(0)
        stream.push(0, TOKEN, 2)
        await asyncio.sleep(0)
        slept = not waiting.done()
        takes = False
        stream.push(0, TOKEN, 3)
        stream.push(0, TOKEN, 3)
        stream.push(0, TOKEN, 4, behind=True)
        return [each.text for _, each in first + await waiting], written, slept

    collected, written, slept = asyncio.run(seen())
    assert slept
    assert len(written) == 2, "the one that was taken, and the one that was not"
    assert len(collected) == 4, "all others wait for the task"


def events(server: Stepped, body: dict[str, Any]) -> list[Any]:
    """The events of a stream whose reader has seen each before the engine's next step."""
    known = len(server.control.added)
    with server.begin("/v1/completions", BODY | body) as reply:
        server.control.step_until(lambda: len(server.control.added) > known)
        found: list[Any] = []
        for line in iter(reply.line, b"data: [DONE]\n"):
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
                server.control.permits.release(1)
        return found


@pytest.mark.parametrize("fields", [{}, {"n": 2, "temperature": 1}, {"logprobs": 1}], ids=OPTIONS)
def test_a_stream_is_the_same_whoever_writes_it(
    fields: dict[str, Any], stepped: Stepped, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    real = Chunks.write

    def write(self: Chunks, data: bytes) -> None:
        written.append(data)
        real(self, data)

    monkeypatch.setattr(Chunks, "write", write)
    at_once = events(stepped, fields)
    assert bool(written) == (not fields)
    monkeypatch.setattr(Chunks, "open", False)
    written.clear()
    by_task = events(stepped, fields)
    assert not written
    assert [each["choices"] for each in at_once] == [each["choices"] for each in by_task]
    texts = [each["choices"][0]["text"] for each in at_once if not each["choices"][0]["index"]]
    assert texts == PIECES


def test_a_token_that_cannot_be_written_ends_its_own_stream_alone(
    stepped: Stepped, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CompletionReply.all_events

    def breaks(self: CompletionReply, deltas: list[tuple[int, TextDelta]]) -> bytes:
        if deltas[0][1].text == "three ":
            raise ZeroDivisionError
        return real(self, deltas)

    # The engine must not end it before it hears of the failure
    stepped.control.pieces = PIECES + ["more "] * 200
    with monkeypatch.context() as patched:
        patched.setattr(CompletionReply, "all_events", breaks)
        *told, last = events(stepped, {"max_tokens": 205})
    assert [each["choices"][0]["text"] for each in told] == PIECES[:2]
    assert last["error"]["code"] == "internal_error"
    stepped.control.step_until(lambda: len(stepped.control.aborted) == 1)
    stepped.control.pieces = PIECES
    assert len(events(stepped, {})) == len(PIECES)
    assert stepped.server_state.client.in_flight == 0
