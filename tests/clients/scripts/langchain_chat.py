"""langchain-openai: bound tools, whole and streamed, and structured output."""

from typing import Any

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr
from task import QUESTION, URL, finish
from task import calculator as compute


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    return compute(expression)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


model = ChatOpenAI(
    model="demo",
    base_url=f"{URL}/v1",
    api_key=SecretStr("none"),
    max_retries=0,
    stream_usage=True,
)
bound = model.bind_tools([calculator])
for streamed in (False, True):
    messages: list[Any] = [HumanMessage(QUESTION)]
    while not isinstance(messages[-1], str):
        message: Any = bound.invoke(messages)
        if streamed:
            message, *rest = bound.stream(messages)
            for chunk in rest:
                message += chunk
        assert message.usage_metadata["output_tokens"] > 0
        messages.append(message if message.tool_calls else message.content)
        messages += [
            ToolMessage(calculator.invoke(call["args"]), tool_call_id=call["id"])
            for call in message.tool_calls
        ]
    finish(f"streamed {streamed}", messages[-1])
for words in (5_000, 50_000):  # refused as tokens, and as characters before
    try:
        model.invoke("word, " * words)
    except ContextOverflowError:
        continue
    raise AssertionError("a prompt that is too long was taken")
assert isinstance(model.with_structured_output(Person).invoke("Make JSON: Ann, 30."), Person)
