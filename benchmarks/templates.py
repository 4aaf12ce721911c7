"""What rendering a chat costs: milliseconds from messages to token ids, on the built-in model.

    python -m benchmarks.templates --save

`render` is the way through the renderer's process, `encode` makes ids of its text, and `in process`
is both at once as `LLM.chat` does it. `text beside hanging chats` is the tokenising of a text while
two chats hang in their template: nothing that they may hold up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import jaxllm
from benchmarks.record import finish, parser, percentiles
from jaxllm.chat_template import TemplateInput
from jaxllm.server.rendering.renders import Renders
from jaxllm.tokenizer import Tokenizer

DEMO = Path(jaxllm.__file__).parent / "demo"
WORDS = "The quick brown fox jumps over the lazy dog, and then it sleeps for 8 hours.\n"
MAX_CHARS = 1 << 24
HANGING = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{{ messages[0].content }}"
)


def conversation(messages: int) -> TemplateInput:
    """Turns of some lines each."""
    roles = ("user", "assistant")
    return TemplateInput(
        messages=[{"role": roles[at % 2], "content": WORDS * 3} for at in range(messages)]
    )


async def times(work: Callable[[], Awaitable[object]], rounds: int) -> dict[str, float]:
    """Milliseconds of one call."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        await work()
        found.append(1e3 * (time.perf_counter() - begin))
    return percentiles(found)


async def measure(tokenizer: Tokenizer, messages: int, rounds: int) -> dict[str, dict[str, float]]:
    """The parts of one conversation's way."""
    given = conversation(messages)
    arguments = given.arguments(tokenizer.templates)
    renders = Renders(tokenizer.template_facts())

    async def encode() -> list[int]:
        return tokenizer.encode_chat(text, True)

    async def in_process() -> list[int]:
        return tokenizer.chat(given)

    try:
        text = await renders.text_of(arguments, True, MAX_CHARS)
        return {
            "render": await times(lambda: renders.text_of(arguments, True, MAX_CHARS), rounds),
            "encode": await times(encode, rounds),
            "in process": await times(in_process, rounds),
        }
    finally:
        await renders.shut_down()


async def beside_hanging(rounds: int) -> dict[str, float]:
    """Tokenising a text while two chats hang."""
    tokenizer = Tokenizer.load(DEMO, HANGING)
    renders = Renders(tokenizer.template_facts())
    arguments = conversation(1).arguments(tokenizer.templates)

    async def encode() -> list[int]:
        return await asyncio.to_thread(tokenizer.encode, WORDS * 60)

    hanging = [asyncio.ensure_future(renders.text_of(arguments, True, MAX_CHARS)) for _ in range(2)]
    found = await times(encode, rounds)
    await renders.shut_down()
    await asyncio.gather(*hanging, return_exceptions=True)
    return found


def main() -> None:
    """Parses the command line and prints the table."""
    own = parser(__doc__)
    own.add_argument("--messages", type=int, default=20)
    own.add_argument("--rounds", type=int, default=1000)
    arguments = own.parse_args()
    tokenizer = Tokenizer.load(DEMO)
    figures = asyncio.run(measure(tokenizer, arguments.messages, arguments.rounds))
    figures["text beside hanging chats"] = asyncio.run(beside_hanging(arguments.rounds // 10))
    for name, one in figures.items():
        print(f"{name:28} p50 {one['p50']:8.3f} ms   p99 {one['p99']:8.3f} ms")
    finish("templates", arguments, figures)


if __name__ == "__main__":
    main()
