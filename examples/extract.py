"""Objects out of text: the answer follows a JSON schema, whatever the model would rather say.

.venv/bin/python examples/extract.py http://localhost:8000
"""

from __future__ import annotations

import sys

from openai import OpenAI
from pydantic import BaseModel

TEXTS = ("Make JSON: name Ann, age 30.", "Make JSON: name Tom, age 7.")


class Person(BaseModel):
    """What to find in each text."""

    name: str
    age: int


def extract(client: OpenAI, text: str) -> Person | None:
    """The person in a text; None if the answer was cut short."""
    model = client.models.list().data[0].id
    reply = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": text}],
        response_format=Person,
        temperature=0,
    )
    return reply.choices[0].message.parsed


if __name__ == "__main__":
    server = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
    for text in TEXTS:
        print(repr(extract(server, text)))
