"""Several turns of one conversation: the server keeps what it has read, and reads the rest only.

.venv/bin/python examples/turns.py http://localhost:8000
"""

from __future__ import annotations

import sys
from typing import Any

from openai import OpenAI

QUESTIONS = (
    "What is 27 + 58?",
    "Sort these numbers: 7, 2, 9",
    "What is the capital of France?",
    "Count from 3 to 9.",
)


def main(url: str) -> None:
    """Ask everything in turn and print how much of each prompt was cached."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        reply = client.chat.completions.create(model=model, messages=messages, temperature=0)
        text, usage = reply.choices[0].message.content, reply.usage
        messages.append({"role": "assistant", "content": text})
        assert usage is not None
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        print(f"{question} {text} [{cached} of {usage.prompt_tokens} prompt tokens cached]")


if __name__ == "__main__":
    main(sys.argv[1])
