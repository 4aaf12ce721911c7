"""anthropic-sdk: messages with a tool, whole and streamed, and their tokens counted."""

from typing import Any

import anthropic
from task import ABOUT, PARAMETERS, QUESTION, TOOL, URL, calculator, finish

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
TOOLS: Any = [{"name": TOOL, "description": ABOUT, "input_schema": PARAMETERS}]


def ask(streamed: bool) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        options: Any = {"model": "demo", "max_tokens": 200, "messages": messages, "tools": TOOLS}
        if streamed:
            with client.messages.stream(**options) as stream:
                message: Any = stream.get_final_message()
        else:
            message = client.messages.create(**options)
        if message.stop_reason != "tool_use":
            return "".join(block.text for block in message.content if block.type == "text")
        messages.append({"role": "assistant", "content": message.content})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": calculator(**call.input)}
            for call in message.content
            if call.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


finish("messages", ask(streamed=False))
finish("messages, streamed", ask(streamed=True))
asked: Any = [{"role": "user", "content": QUESTION}]
assert client.messages.count_tokens(model="demo", messages=asked, tools=TOOLS).input_tokens > 20
