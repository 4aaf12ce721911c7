"""Choices that come as one delta are read as if their tokens had come one at a time."""

from __future__ import annotations

import functools
from typing import Any

import orjson
import pytest

from jaxllm.logprobs import packed_from
from jaxllm.messages import TextDelta, TokenLogprobs
from jaxllm.server.openai.chat_reply import ChatReply
from jaxllm.server.openai.parts_reply import by_token
from jaxllm.server.openai.replies import ReplySpec
from jaxllm.server.parsing.pipeline import pipeline
from jaxllm.server.parsing.reasoning.qwen3 import Parser

BYTES = [b"<think>", b"hm", b" \xc3", b"\xa9", b"</think>", b"\n\n", b"yes", b"!", b"<|end|>"]
TEXT = "<think>hm é</think>\n\nyes!"


class Names:
    """Tokens of `BYTES`."""

    def token_text(self, id: int) -> str:
        return BYTES[id].decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        return BYTES[id]


def whole() -> TextDelta:
    ids = list(range(len(BYTES)))
    entries = [TokenLogprobs(token_id=id, logprob=-1.0, rank=1, top=[]) for id in ids]
    return TextDelta(
        id="x",
        index=0,
        token_ids=ids,
        text=TEXT,
        logprobs=packed_from(entries, 0),
        finish_reason="stop",
    )


def reply(hides: bool) -> ChatReply:
    keep = (lambda part: type(part).__name__ != "Reasoning") if hides else None
    made = functools.partial(pipeline, Parser, None, keep=keep)
    spec = ReplySpec(prompts=[[1]], new_pipeline=made, hides_reasoning=hides)
    return ChatReply("id", "model", "print", spec, 1, Names())


def tokens(logprobs: dict[str, Any] | None) -> list[str]:
    return [] if logprobs is None else [entry["token"] for entry in logprobs["content"]]


def test_a_delta_is_cut_into_its_tokens() -> None:
    found = list(by_token(whole(), Names()))
    assert [one.text for one in found] == [
        *("<think>", "hm", " ", "é", "</think>", "\n\n", "yes", "!"),
        "",
    ]
    assert [one.finish_reason for one in found] == [None] * 8 + ["stop"]
    assert b"".join(one.logprobs or b"" for one in found) == whole().logprobs


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hm</think>yes", ["hm", "</think>", "yes"]),
        ("?\u00e9hm</think>yes", ["?\u00e9hm", "</think>", "yes"]),
        ("hm</think>y", ["hm", "</think>", "y"]),
        ("hm</th", ["hm", "", "</th"]),
        ("?hm</th", ["?hm", "", "</th"]),
        ("hm</think>", ["hm", "</think>", ""]),
        ("?\ufffd!", ["", "", "?\ufffd!"]),
        ("", ["", "", ""]),
    ],
    ids=["all", "held", "cut", "within", "held, cut", "none", "others", "empty"],
)
def test_text_held_back_is_with_its_neighbours(text: str, pieces: list[str]) -> None:
    ids = [BYTES.index(own) for own in (b"hm", b"</think>", b"yes")]
    delta = TextDelta(id="x", index=0, token_ids=ids, text=text)
    assert [one.text for one in by_token(delta, Names())] == pieces


def test_text_that_is_no_tokens_own_is_not_looked_for_everywhere() -> None:
    asked = []

    class Counting(bytes):
        def startswith(self, *given: Any) -> bool:
            asked.append(given)
            return super().startswith(*given)

    class Other(Names):
        def token_bytes(self, id: int) -> bytes:
            return Counting(b"a")

    delta = TextDelta(id="x", index=0, token_ids=[0] * 100, text="a?" * 1000)
    assert [one.text for one in by_token(delta, Other())][-1].endswith("a?")
    assert len(asked) < 100 * 100, "not a pass over the tokens for each byte"


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_within_a_delta_is_counted_and_hidden(hides: bool, stream: bool) -> None:
    one = reply(hides)
    if stream:
        lines = one.events(0, whole()).split(b"\n\n")
        chunks = [orjson.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines[:-1]]
        shown = [token for chunk in chunks for token in tokens(chunk["logprobs"])]
        text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
        ends = [chunk["finish_reason"] for chunk in chunks]
        assert ends == [None] * (len(ends) - 1) + ["stop"]
    else:
        one.add_delta(0, whole())
        choice = one.full_reply()["choices"][0]
        shown = tokens(orjson.loads(orjson.dumps(choice["logprobs"])))
        text = choice["message"]["content"]
    assert text == "yes!"
    assert shown[-4:] == ["\n\n", "yes", "!", "<|end|>"]
    assert len(shown) == (4 if hides else len(BYTES))
    assert one.usage()["completion_tokens_details"] == {"reasoning_tokens": 4}
