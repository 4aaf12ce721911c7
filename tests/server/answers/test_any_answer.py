"""Whatever a model says, and wherever its answer is cut: a stream says what the whole reply says,
and what the request was promised holds."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from tests.server.answers.asking import PARIS, SCHEMAS, THOUGHT, ask, check_promise
from tests.server.answers.replies import streamed, whole
from tests.server.answers.speaker import ScriptedServer
from tests.server.answers.worlds import WORLDS
from tools.answer_matrix import Cell, cells, promise

PUNCTUATION = [
    *"<>{}[]()|=:,;\"'\\/`\n\t -.0é",
    "null",
    "True",
    "\\u00",
    "</parameter>",
    "</think>",
]
FRAGMENT = re.compile(r"<[^<>\s]*>|\[[A-Z_]+\]|\w+|\s+|.")
TOKENS_ALONE = "gpt_oss"  # whose heads of messages are tokens, which no text holds
WHOLE = [cell for cell in cells() if not cell.streamed]


def babble(name: str, chance: random.Random) -> str:
    """An output of calls, thought and text, taken apart and put together otherwise."""
    world = WORLDS[name]
    known = [
        world.calls((PARIS,)),
        world.calls(tuple((called, {}) for called in SCHEMAS)),
        world.thought(THOUGHT),
        world.before_call("Well."),
        world.reply('{"celsius": 21, "sky": "clear"}'),
    ]
    halves = [text[at:] for text in known for at in (0, len(text) // 3, len(text) // 2)]
    starts = [text[:at] for text in known for at in (len(text) // 3, len(text) // 2)]
    fragments = [fragment for text in known for fragment in FRAGMENT.findall(text)]
    kinds = (halves + starts, fragments, PUNCTUATION)
    return "".join(chance.choice(chance.choice(kinds)) for _ in range(chance.randrange(12)))


def check_babble(server: ScriptedServer, cell: Cell, chance: random.Random) -> None:
    """One answer of a model that babbles, cut or not."""
    wish = babble(cell.format, chance)
    options = {"max_tokens": chance.randrange(1, 120)} if chance.random() < 0.4 else {}
    answer = ask(server, cell, wish, **options)
    if promise(cell.format, cell.request).refused:
        assert answer.status == 400
        return
    said = whole(answer)
    pieces = streamed(ask(server, cell._replace(streamed=True), wish, **options))
    assert replace(pieces, ids=[]) == replace(said, ids=[]), (cell.name, wish)
    if said.finish_reason != "length":
        check_promise(said, cell)


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_a_stream_says_what_the_whole_reply_says(
    servers: dict[bool, ScriptedServer], name: str
) -> None:
    chance = random.Random(name)
    some = [cell for cell in WHOLE if cell.format == name]
    for cell in chance.sample(some, 4):
        tokens = chance.random() < 0.5 or name == TOKENS_ALONE
        check_babble(servers[tokens], cell, chance)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", sorted(WORLDS))
def test_any_stream_says_what_the_whole_reply_says(
    servers: dict[bool, ScriptedServer], name: str, seed: int
) -> None:
    chance = random.Random(f"{name} {seed}")
    for cell in WHOLE:
        if cell.format == name:
            check_babble(servers[seed % 2 == 0 or name == TOKENS_ALONE], cell, chance)
