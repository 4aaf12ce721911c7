"""Replies as such: what many log-probabilities cost the server's process."""

from __future__ import annotations

import gc
from typing import Any

import orjson
import pytest

from jaxllm.logprobs import packed_from
from jaxllm.messages import PromptLogprobs, TextDelta, TokenLogprobs
from jaxllm.server.openai.chat_reply import ChatReply
from jaxllm.server.openai.completion_reply import CompletionReply
from jaxllm.server.openai.replies import Reply, ReplySpec

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
