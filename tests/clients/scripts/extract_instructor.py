"""instructor: objects through tools, strict tools and JSON schemas, whole and in parts."""

from typing import Any

import instructor
import openai
from pydantic import BaseModel
from task import QUESTION, URL, calculator, finish


class Calculator(BaseModel):
    """Evaluate an arithmetic expression."""

    expression: str


class Person(BaseModel):
    """A person."""

    name: str
    age: int


plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
OPTIONS: Any = {"model": "demo", "max_retries": 0, "temperature": 0}


def asked(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(plain, mode=mode)
    options = OPTIONS | {"response_model": Calculator, "messages": asked(QUESTION)}
    finish(mode.name, calculator(client.chat.completions.create(**options).expression))
    *_, last = client.chat.completions.create_partial(**options)
    finish(f"{mode.name}, streamed", calculator(last.expression))

client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
options = OPTIONS | {"response_model": Person, "messages": asked("Make JSON: name Ann, age 30.")}
assert isinstance(client.chat.completions.create(**options), Person)
*_, last = client.chat.completions.create_partial(**options)
assert isinstance(last.name, str) and isinstance(last.age, int)
