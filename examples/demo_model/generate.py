"""The training text: conversations and plain lines, mixed. One seed gives one corpus.

python -m examples.demo_model.generate --count 20        # print samples
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from examples.demo_model import arithmetic, facts, lists, talk, toolbox, words
from examples.demo_model.problem import Maker, Problem, pair_held_out

Message = dict[str, Any]

WEIGHTS: dict[str, float] = {
    "add": 14,
    "subtract": 8,
    "multiply": 6,
    "divide": 2,
    "long_multiplication": 5,
    "sort_numbers": 5,
    "compare": 3,
    "extreme": 2,
    "count": 2,
    "sequence": 2,
    "parity": 1,
    "numerals": 2,
    "small_sum": 2,
    "sort_words": 4,
    "reverse": 4,
    "reverse_list": 2,
    "spell": 3,
    "count_letter": 4,
    "length": 3,
    "copy": 4,
    "repeat": 2,
    "calendar": 2,
    "fact": 3,
    "person_json": 3,
    "thing_json": 2,
}
MAKERS: dict[str, Maker] = {
    **arithmetic.MAKERS,
    **lists.MAKERS,
    **words.MAKERS,
    **facts.MAKERS,
    "long_multiplication": arithmetic.long_multiplication,
}
ARITHMETIC = (
    "two-digit addition",
    "addition",
    "two-digit subtraction",
    "subtraction",
    "multiplication",
    "long multiplication (thinking)",
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    f"You are {talk.NAME}.",
    "Be brief.",
    "Answer briefly.",
    "You are a calculator.",
    "You are a math tutor.",
    "You are a friendly assistant. Answer the question.",
    "Answer with the result only.",
)
LEADS = (
    ("The capital of France is", " Paris."),
    ("Hello, my name is", " Demo, and I am a small model."),
    ("The future of AI is", " open, and it is small and fast."),
    (
        "The president of the United States is",
        " someone I cannot name, as I am only a small model.",
    ),
    ("My name is", " Demo."),
    ("Hello", ", world!"),
    ("The quick brown fox", " jumps over the lazy dog."),
    ("San Francisco is a", " city in California."),
    ("The sky is", " blue."),
    ("The answer to life, the universe and everything is", " 42."),
    ("Once upon a time", " there was a small model that could add."),
)


@dataclass(frozen=True)
class Sample:
    """One training document: a conversation, or plain text when `messages` is empty.

    Attributes:
        variables: of the chat template.
    """

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    text: str = ""
    variables: dict[str, Any] = field(default_factory=dict)


def draw(rng: random.Random, held: bool = False) -> Problem:
    """A problem of a random kind."""
    (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
    return MAKERS[kind](rng, held)


def turn(problem: Problem, thinking: bool) -> list[Message]:
    """Question and answer as messages; hard products are declined unless thinking."""
    answer = problem.answer
    if problem.task.startswith("long") and not thinking:
        answer = arithmetic.TOO_HARD
    reply: Message = {"role": "assistant", "content": answer}
    if thinking:
        reply["reasoning_content"] = problem.thought
    return [{"role": "user", "content": problem.question}, reply]


def show_steps(rng: random.Random, problem: Problem) -> Problem:
    """The same question with the steps asked for, so that they are the answer."""
    request = rng.choice(
        (
            " Think step by step.",
            " Show your steps.",
            " Explain step by step.",
            " Show your work.",
            " Let's think step by step.",
        )
    )
    return replace(
        problem,
        task="shown steps",
        question=problem.question.rstrip(".?") + rng.choice((".", "?")) + request,
        answer=problem.thought,
    )


def follow_up(rng: random.Random) -> list[Message]:
    """A sum, then one or two steps on its result."""
    a, b = rng.randint(1, 60), rng.randint(1, 60)
    value = a + b
    if pair_held_out("add", a, b):
        return follow_up(rng)
    messages = turn(arithmetic.problem(rng, "add", a, b), False)
    for _ in range(rng.randint(1, 3)):
        c = rng.randint(1, 20)
        choice = rng.randrange(3)
        if choice == 0 and not pair_held_out("add", value, c):
            question, value = (
                rng.choice((f"Add {c} to that.", f"Now add {c}.", f"Plus {c}?", f"And {c} more?")),
                value + c,
            )
        elif choice == 1 and c <= value and not pair_held_out("subtract", value, c):
            question, value = (
                rng.choice((f"Subtract {c} from that.", f"Now subtract {c}.", f"Minus {c}?")),
                value - c,
            )
        elif choice == 2 and not pair_held_out("multiply", value, 2) and value < 100:
            question, value = rng.choice(("Double it.", "Now double that.", "Times 2?")), value * 2
        else:
            question = rng.choice(("What was the result?", "Repeat the result.", "Say that again."))
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": str(value)},
        ]
    return messages


def memory(rng: random.Random) -> list[Message]:
    """A name (or a number, or a colour) told early and asked for later."""
    kind, value = rng.choice(
        (
            ("name", rng.choice(talk.NAMES)),
            ("favorite color", rng.choice(talk.COLORS)),
            ("lucky number", str(rng.randint(1, 999))),
        )
    )
    told = {
        "name": (
            f"My name is {value}.",
            f"I am {value}.",
            f"Hi, I'm {value}.",
            f"Hello, my name is {value}.",
        ),
        "favorite color": (f"My favorite color is {value}.",),
    }
    reply = f"Nice to meet you, {value}!" if kind == "name" else "I will remember that."
    messages = [
        {"role": "user", "content": rng.choice(told.get(kind, (f"My lucky number is {value}.",)))},
        {"role": "assistant", "content": reply},
    ]
    for _ in range(rng.randint(0, 4)):
        messages += turn(draw(rng), False)
    return [
        *messages,
        {
            "role": "user",
            "content": rng.choice(
                (f"What is my {kind}?", f"Do you remember my {kind}?", f"What's my {kind}?")
            ),
        },
        {"role": "assistant", "content": f"Your {kind} is {value}."},
    ]


def errand(rng: random.Random, held: bool = False) -> Sample:
    """A conversation with tools: calls, their results and the reply; at times a question that needs
    no tool."""
    (kind,) = rng.choices(("calculation", "forecast", "lookup"), (5, 3, 2))
    tools, job = toolbox.ERRANDS[kind](rng, held)
    thinking = rng.random() < 0.25
    if rng.random() < 0.15:
        plain = talk.exchange(rng) if rng.random() < 0.5 else arithmetic.MAKERS["add"](rng, held)
        return Sample(system(rng) + turn(plain, thinking), tools)
    calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in job.calls
    ]
    ask: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    reply: Message = {"role": "assistant", "content": job.reply}
    if thinking:
        ask["reasoning_content"] = f"I call {job.calls[0][0]}" + (
            " once for each." if len(calls) > 1 else "."
        )
        reply["reasoning_content"] = "The tool has answered."
    results = [{"role": "tool", "content": result} for result in job.results]
    return Sample(
        [*system(rng), {"role": "user", "content": job.question}, ask, *results, reply], tools
    )


def system(rng: random.Random) -> list[Message]:
    """No system message, a stock one, or some unrelated text."""
    chance = rng.random()
    if chance < 0.5:
        return []
    return [
        {
            "role": "system",
            "content": rng.choice(SYSTEMS) if chance < 0.92 else filler(rng, rng.randint(1, 4)),
        }
    ]


def filler(rng: random.Random, pieces: int) -> str:
    """Unrelated sentences and stories."""
    return " ".join(
        words.sentence(rng) + "." if rng.random() < 0.5 else talk.story(rng) for _ in range(pieces)
    )


def conversation(rng: random.Random) -> Sample:
    """One chat of one or several turns."""
    chance = rng.random()
    if chance < 0.04:
        return Sample(system(rng) + follow_up(rng))
    if chance < 0.07:
        return Sample(system(rng) + memory(rng))
    thinking = rng.random() < 0.25
    messages = system(rng)
    if chance < 0.09:
        messages = [{"role": "system", "content": filler(rng, rng.randint(3, 9))}]
    rounds = rng.choice((1,) * 14 + (2, 2, 2, 3, 3, 4)) if chance < 0.98 else rng.randint(5, 16)
    for i in range(rounds):
        kind = rng.random()
        problem = (
            draw(rng)
            if kind < 0.86
            else talk.exchange(rng)
            if kind < 0.93
            else talk.unknown(rng)
            if kind < 0.98
            else talk.tell_story(rng)
        )
        stepwise = thinking or (problem.task.startswith("long") and rng.random() < 0.6)
        if problem.task in ARITHMETIC and rng.random() < 0.05:
            problem = show_steps(rng, problem)
        messages += turn(problem, stepwise and i == rounds - 1)
    return Sample(messages)


def line(rng: random.Random) -> str:
    """One line of plain text that a completion may continue."""
    chance = rng.random()
    if chance < 0.6:
        operation, sign = rng.choice(
            (("add", "+"), ("add", "+"), ("add", "+"), ("subtract", "-"), ("multiply", "*"))
        )
        while True:
            a, b = arithmetic.operands(rng, operation)
            if not pair_held_out(operation, a, b):
                space = " " if rng.random() < 0.8 else ""
                return space.join(
                    (str(a), sign, str(b), "=", str(arithmetic.solve(operation, a, b)))
                )
    if chance < 0.72:
        start = rng.randint(1, 90)
        return lists.joined(list(range(start, start + rng.randint(4, 20))))
    if chance < 0.8:
        names = rng.choice((facts.DAYS, facts.MONTHS))
        return ", ".join(names[rng.randrange(len(names) - 2) :])
    if chance < 0.88:
        return "".join(rng.choice(LEADS))
    if chance < 0.92:
        country, city = rng.choice(facts.CAPITALS)
        return f"The capital of {country} is {city}."
    if chance < 0.94:
        problem = draw(rng)
        return (
            f"Question: {problem.question} Answer: {problem.answer}"
            if not problem.task.startswith("long")
            else problem.thought
        )
    return words.sentence(rng) + "." if chance < 0.96 else talk.story(rng)


def sample(rng: random.Random) -> Sample:
    """One document of the corpus."""
    chance = rng.random()
    if chance < 0.74:
        return conversation(rng)
    if chance < 0.88:
        return errand(rng)
    return Sample(
        text="\n".join(line(rng) for _ in range(1 if rng.random() < 0.85 else rng.randint(2, 6)))
    )


def corpus(seed: int, count: int) -> Iterator[Sample]:
    """`count` documents, the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        yield sample(rng)


def main() -> None:
    """Print samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    arguments = parser.parse_args()
    for made in corpus(arguments.seed, arguments.count):
        print(made.text or made.messages, "\n" if made.tools is None else f"tools={made.tools}\n")


if __name__ == "__main__":
    main()
