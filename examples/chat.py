"""Chat with a server in a terminal: type a line, Ctrl-D ends. Answers stream, thinking is dimmed.

make serve
.venv/bin/python examples/chat.py http://localhost:8000
"""

from __future__ import annotations

import sys
from typing import Any

from openai import OpenAI

DIM, PLAIN = "\033[2m", "\033[0m"


def answer(client: OpenAI, model: str, messages: list[Any]) -> str:
    """Print an answer as it comes; its text."""
    said = []
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        stream=True,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}},
    )
    for chunk in stream:
        delta: Any = chunk.choices[0].delta
        if thought := getattr(delta, "reasoning", None):
            print(f"{DIM}{thought}{PLAIN}", end="", flush=True)
        if delta.content:
            said.append(delta.content)
            print(delta.content, end="", flush=True)
    print()
    return "".join(said)


def main(url: str) -> None:
    """One turn a line of standard input."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: list[Any] = []
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.strip()})
        messages.append({"role": "assistant", "content": answer(client, model, messages)})


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["http://localhost:8000"])
