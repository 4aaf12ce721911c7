"""Replies as such: the events of every token, and what many log-probabilities cost the process."""

from __future__ import annotations

import functools
import gc
from typing import Any

import orjson
import pytest

from jaxllm.logprobs import packed_from
from jaxllm.messages import PromptLogprobs, TextDelta, TokenLogprobs
from jaxllm.server.openai.chat_reply import ChatReply
from jaxllm.server.openai.completion_reply import CompletionReply
from jaxllm.server.openai.replies import Reply, ReplySpec
from jaxllm.server.parsing.parts import Part, Reasoning
from jaxllm.server.parsing.pipeline import pipeline
from jaxllm.server.parsing.registry import find_reasoning, find_tools
from tests.server.parsing.samples import CODE_JSON, TOOLS

PROMPT, TOP, SAID = list(range(2, 202)), 5, [7, 8]


class Names:
    """Tokens are called by their ids; counts how often one is asked for."""

    asked = 0

    def token_text(self, id: int) -> str:
        self.asked += 1
        return f"<{id}>"

    def token_bytes(self, id: int) -> bytes:
        return self.token_text(id).encode()


def entries(tokens: list[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(
            token_id=id, logprob=-1.0, rank=2, top=[(id + at, -0.5 * at) for at in range(TOP)]
        )
        for id in tokens
    ]


def answered(kind: type[Reply], n: int, **shown: Any) -> tuple[Reply, Names]:
    """A reply of `n` choices that have ended."""
    names = Names()
    reply = kind("id", "model", "print", ReplySpec(prompts=[PROMPT], **shown), n, names)
    scores = PromptLogprobs(top=TOP, packed=packed_from(entries(PROMPT[1:]), TOP))
    for index in range(n):
        said = packed_from(entries(SAID), TOP)
        reply.add_delta(
            0,
            TextDelta(
                id="id",
                index=index,
                token_ids=SAID,
                text="ab",
                logprobs=said,
                prompt_logprobs=scores,
                finish_reason="stop",
            ),
        )
    return reply, names


@pytest.mark.parametrize(
    "shown",
    [{"prompt_logprobs": TOP}, {"texts": ["text"], "logprobs": TOP}],
    ids=["prompt_logprobs", "echo"],
)
def test_the_log_probabilities_of_a_prompt_are_written_down_once_for_all_its_choices(
    shown: dict[str, Any],
) -> None:
    (one, of_one), (many, of_many) = (answered(CompletionReply, n, **shown) for n in (1, 9))
    alone, together = (orjson.loads(orjson.dumps(reply.full_reply())) for reply in (one, many))
    assert [choice | {"index": 0} for choice in together["choices"]] == alone["choices"] * 9
    assert len(
        (alone["choices"][0].get("prompt_logprobs") or alone["choices"][0]["logprobs"]["tokens"])[
            : len(PROMPT)
        ]
    ) == len(PROMPT)
    own = len(SAID) * (1 + TOP)
    assert of_many.asked - 9 * own == of_one.asked - own


@pytest.mark.parametrize("kind", [CompletionReply, ChatReply])
def test_log_probabilities_are_no_objects_for_the_collector(kind: type[Reply]) -> None:
    """Whose rounds hold every stream up: there is less than one for each position, not several for
    each entry of one."""
    reply, _ = answered(kind, 8, prompt_logprobs=TOP)
    gc.collect()
    before = len(gc.get_objects())
    whole = reply.full_reply()
    assert len(gc.get_objects()) - before < len(PROMPT)
    assert whole["choices"]


ANSWER = (
    "<think>\nIs 1 < 2?\nYes.\n</think>\n\nSo: <b>\n\n- one\n"
    f'<tool_call>\n{{"name": "run", "arguments": {{"code": "{CODE_JSON}"}}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "run", "arguments": {"code": "x"}}\n</tool_call>\nDone.'
)


def said(part: Part) -> bool:
    return not isinstance(part, Reasoning)


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("keep", [None, said], ids=["all", "said"])
@pytest.mark.parametrize("kind", [CompletionReply, ChatReply])
def test_chunks_are_the_same_whether_or_not_each_has_its_usage(
    kind: type[Reply], keep: Any, size: int
) -> None:
    """With usage, every event is thought out; without, most are put together of prepared ends."""
    new = functools.partial(
        pipeline, find_reasoning("qwen3", None), find_tools("hermes", None), "", TOOLS, keep=keep
    )
    spec = ReplySpec(prompts=[PROMPT], new_pipeline=new)
    replies = [kind("id", "model", "print", spec, 2, Names()) for _ in range(2)]
    replies[0].with_usage(at_end=True, always=True)
    texts = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    for text in [*texts, ""]:
        for index in (1, 0):
            delta = TextDelta(id="id", index=index, token_ids=[7], text=text)
            slow, fast = (chunks(reply.events(0, delta)) for reply in replies)
            assert slow == fast
    assert replies[0].usage() == replies[1].usage()


def chunks(events: bytes) -> list[dict[str, Any]]:
    """The chunks of events, without the ids of calls, which are drawn, and without usage."""
    found = [orjson.loads(event[6:]) for event in events.split(b"\n\n") if event]
    for chunk in found:
        del chunk["created"]
        chunk.pop("usage", None)
        for call in chunk["choices"][0].get("delta", {}).get("tool_calls", ()):
            call.pop("id", None)
    return found
