"""The training text: plain text and short chats, and what agents need.

python -m examples.demo_model.skills.corpus --count 20        # print samples
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import replace

from examples.demo_model import generate
from examples.demo_model.generate import Sample
from examples.demo_model.skills import errands, schemas
from examples.demo_model.skills.tools import BY_NAME
from examples.demo_model.tokenizer import render, renderer

# Shares of documents. Those of tools are three times as long as the others.
PLAIN, ERRANDS, SCHEMAS = 0.66, 0.23, 0.11


def plain(rng: random.Random) -> Sample:
    """A document of `generate.py`; calls in either format, none of a held-out city's weather."""
    while True:
        sample = generate.sample(rng)
        if sample.tools is None:
            return sample
        if not any(map(is_held_out, sample.messages)):
            tool_format = "xml" if rng.random() < 0.4 else "json"
            return replace(sample, variables={"tool_format": tool_format})


def is_held_out(message: generate.Message) -> bool:
    """Whether a message asks for the weather of a held-out city."""
    calls = message.get("tool_calls", ())
    cities = [
        value
        for call in calls
        for key, value in call["function"]["arguments"].items()
        if key in ("city", "location")
    ]
    return any(BY_NAME["get_weather"].held_out([city]) for city in cities)


def sample(rng: random.Random) -> Sample:
    """One document."""
    chance = rng.random()
    if chance < PLAIN:
        return plain(rng)
    return errands.sample(rng) if chance < PLAIN + ERRANDS else schemas.sample(rng)


def corpus(seed: int, count: int) -> Iterator[Sample]:
    """`count` documents, the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        yield sample(rng)


def main() -> None:
    """Print samples as the model reads them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    arguments = parser.parse_args()
    template = renderer()
    for made in corpus(arguments.seed, arguments.count):
        print(render(template, made), end="\n\n")


if __name__ == "__main__":
    main()
