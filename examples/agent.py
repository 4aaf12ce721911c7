"""An agent: the model calls tools until it can answer.

.venv/bin/python examples/agent.py http://localhost:8000 "What is 4839 * 273?"
"""

from __future__ import annotations

import json
import operator
import sys
from typing import Any

from openai import OpenAI

OPERATIONS = {"*": operator.mul, "+": operator.add, "-": operator.sub}


def calculator(expression: str) -> str:
    """Two whole numbers with an operation between them."""
    a, sign, b = expression.split()
    return str(OPERATIONS[sign](int(a), int(b)))


TOOLS = {"calculator": calculator}
DESCRIBED: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def run(client: OpenAI, question: str) -> str | None:
    """The answer after as many tool calls as it takes. An error of a tool is its result."""
    messages: list[Any] = [{"role": "user", "content": question}]
    model = client.models.list().data[0].id
    for _ in range(8):
        reply = client.chat.completions.create(model=model, messages=messages, tools=[DESCRIBED])
        message: Any = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            try:
                result = TOOLS[call.function.name](**json.loads(call.function.arguments))
            except (KeyError, TypeError, ValueError) as error:
                result = f"error: {error}"
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            return message.content
    return None


if __name__ == "__main__":
    print(run(OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"), sys.argv[2]))
