"""openai-python: chats and responses, whole and streamed, and a parsed answer."""

import json
from typing import Any

import openai
from pydantic import BaseModel
from task import ABOUT, PARAMETERS, QUESTION, TOOL, URL, calculator, finish

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
FUNCTION = {"name": TOOL, "description": ABOUT, "parameters": PARAMETERS}


class Answer(BaseModel):
    name: str
    age: int


def chat(streamed: bool) -> str | None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    options: Any = {"model": "demo", "tools": [{"type": "function", "function": FUNCTION}]}
    while True:
        if streamed:
            with client.chat.completions.stream(messages=messages, **options) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = (
                client.chat.completions.create(messages=messages, **options).choices[0].message
            )
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = calculator(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


finish("chat", chat(streamed=False))
finish("chat, streamed", chat(streamed=True))
asked: Any = [{"role": "user", "content": "Make JSON: name Ann, age 30."}]
parsed = client.chat.completions.parse(model="demo", messages=asked, response_format=Answer)
assert isinstance(parsed.choices[0].message.parsed, Answer)
