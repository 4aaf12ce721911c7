"""litellm: its two routes to OpenAI-like servers and Anthropic's, streamed and not."""

import json
from typing import Any

import litellm
from task import ABOUT, PARAMETERS, QUESTION, TOOL, URL, calculator, finish

FUNCTION = {"name": TOOL, "description": ABOUT, "parameters": PARAMETERS}
ROUTES = {"openai/demo": f"{URL}/v1", "hosted_vllm/demo": f"{URL}/v1", "anthropic/demo": URL}


def ask(model: str, streamed: bool) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        reply: Any = litellm.completion(
            model=model,
            messages=messages,
            tools=[{"type": "function", "function": FUNCTION}],
            api_base=ROUTES[model],
            api_key="none",
            stream=streamed,
            max_tokens=200,
        )
        if streamed:
            reply = litellm.stream_chunk_builder(list(reply))
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = calculator(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def refuse(model: str, words: int) -> None:
    messages = [{"role": "user", "content": "word, " * words}]
    try:
        litellm.completion(model=model, messages=messages, api_base=ROUTES[model], api_key="none")
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("a prompt that is too long was taken")


for model in ROUTES:
    for words in (5_000, 50_000):  # refused as tokens, and as characters before
        refuse(model, words)
    finish(model, ask(model, streamed=False))
    finish(f"{model}, streamed", ask(model, streamed=True))
