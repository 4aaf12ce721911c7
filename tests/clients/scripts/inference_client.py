"""huggingface_hub's InferenceClient: a server by its address, tools, whole and streamed."""

import json
from typing import Any

from huggingface_hub import InferenceClient
from task import ABOUT, PARAMETERS, QUESTION, TOOL, URL, calculator, finish

FUNCTION = {"name": TOOL, "description": ABOUT, "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
client = InferenceClient(model=URL, api_key="none")


def ask(messages: list[Any], **options: Any) -> Any:
    return client.chat_completion(messages, model="demo", max_tokens=200, **options)


for streamed in (False, True):
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    message = ask(messages, tools=TOOLS).choices[0].message
    for call in message.tool_calls:
        function = {"name": call.function.name, "arguments": call.function.arguments}
        called = {"id": call.id, "type": "function", "function": function}
        messages.append({"role": "assistant", "tool_calls": [called]})
        result = calculator(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = ask(messages, tools=TOOLS, stream=streamed)
    if streamed:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
    else:
        text = answer.choices[0].message.content
    finish(f"streamed {streamed}", text)
