"""Calendar, capitals, opposites and other small facts; JSON answers. Problems with one right answer
each."""

from __future__ import annotations

import json
import random

from examples.demo_model.lexicon import (
    ANIMALS,
    CAPITALS,
    CITIES,
    COLORS,
    DAYS,
    FRUITS,
    JOBS,
    MONTH_LENGTHS,
    MONTHS,
    NAMES,
    OPPOSITES,
    ORDINALS,
    QUANTITIES,
    SOUNDS,
    THING_COLORS,
)
from examples.demo_model.lists import joined
from examples.demo_model.problem import Maker, Problem, held_out, vary


def calendar(rng: random.Random, held: bool) -> Problem:
    """Days and months: next, previous, position, length. Facts cannot be held out; `held` only asks
    for the task's name."""
    names, unit = (DAYS, "day") if rng.random() < 0.5 else (MONTHS, "month")
    i = rng.randrange(len(names))
    kind = rng.randrange(5)
    if kind == 0:
        question = rng.choice(
            (
                f"What {unit} comes after {names[i]}?",
                f"Which {unit} follows {names[i]}?",
                f"What is the {unit} after {names[i]}?",
            )
        )
        answer = names[(i + 1) % len(names)]
    elif kind == 1:
        question = rng.choice(
            (f"What {unit} comes before {names[i]}?", f"Which {unit} is before {names[i]}?")
        )
        answer = names[i - 1]
    elif kind == 2:
        whole = "week" if unit == "day" else "year"
        question, answer = f"What is the {ORDINALS[i]} {unit} of the {whole}?", names[i]
    elif kind == 3:
        whole = "week" if unit == "day" else "year"
        question = rng.choice(
            (
                f"List the {unit}s of the {whole}.",
                f"What are the {unit}s of the {whole}?",
                f"Name all {unit}s of the {whole}.",
            )
        )
        answer = joined(list(names))
    else:
        i = rng.randrange(12)
        question, answer = (
            f"How many days does {MONTHS[i]} have?",
            "28, or 29 in a leap year" if i == 1 else str(MONTH_LENGTHS[i]),
        )
    return Problem("days and months", vary(rng, question), answer, f"The calendar says {answer}.")


def fact(rng: random.Random, held: bool) -> Problem:
    """A capital, an opposite, a colour, a sound or a quantity."""
    kind = rng.randrange(5)
    if kind == 0:
        country, city = rng.choice(CAPITALS)
        phrases = (
            "What is the capital of {c}?",
            "What's the capital of {c}?",
            "Name the capital of {c}.",
            "Which city is the capital of {c}?",
        )
        question, answer = rng.choice(phrases).format(c=country), city
        if rng.random() < 0.15:
            answer = country[0].upper() + country[1:]
            question = f"{city} is the capital of which country?"
            if city in ("London", "Washington"):
                return fact(rng, held)
    elif kind == 1:
        pair = rng.choice(OPPOSITES)
        word, answer = pair if rng.random() < 0.6 else pair[::-1]
        question = rng.choice(
            ("What is the opposite of {w}?", "Opposite of {w}?", "Give the opposite of {w}.")
        ).format(w=word)
    elif kind == 2:
        thing, answer = rng.choice(THING_COLORS)
        question = rng.choice(
            ("What color is {t}?", "What colour is {t}?", "Which color is {t}?")
        ).format(t=thing)
    elif kind == 3:
        animal, answer = rng.choice(SOUNDS)
        question = rng.choice(("What sound does a {a} make?", "What does a {a} say?")).format(
            a=animal
        )
    else:
        words, n = rng.choice(QUANTITIES)
        question, answer = f"How many {words}?", str(n)
    return Problem("facts", vary(rng, question), answer, f"I know this one: {answer}.")


def person_json(rng: random.Random, held: bool) -> Problem:
    """A JSON object about a person, from a name and an age or from a sentence."""
    while True:
        name, age = rng.choice(NAMES), rng.randint(1, 99)
        if held_out("person", name, age) == held:
            break
    fields: dict[str, object] = {"name": name, "age": age}
    kind = rng.randrange(4)
    if kind == 0:
        phrases = (
            "Give a JSON object with name and age for {n}, {a} years old.",
            "Write JSON with the keys name and age: {n}, {a}.",
            "Make a JSON object with name and age for {n} who is {a}.",
            "Extract the name and age as JSON: {n} is {a} years old.",
            "Return JSON with name and age. {n} is {a} years old.",
            "{n} is {a}. Answer in JSON with name and age.",
            "JSON for name {n}, age {a}.",
            "Give me JSON: name {n}, age {a}.",
        )
        question = rng.choice(phrases).format(n=name, a=age)
    elif kind == 1:
        fields["city"] = rng.choice(CITIES)
        phrases = (
            "Extract name, age and city as JSON: {n} is {a} years old and lives in {c}.",
            "Give a JSON object with name, age and city for {n}, {a}, from {c}.",
        )
        question = rng.choice(phrases).format(n=name, a=age, c=fields["city"])
    elif kind == 2:
        fields["job"] = rng.choice(JOBS)
        question = f"Extract name, age and job as JSON: {name}, {age}, works as a {fields['job']}."
    else:
        fields["student"] = rng.random() < 0.5
        question = (
            f"Write JSON with name, age and student (true or false): {name} is {age} and is "
            f"{'' if fields['student'] else 'not '}a student."
        )
    return Problem(
        "JSON objects",
        vary(rng, question),
        json.dumps(fields),
        f"The keys are {joined(list(fields))}.",
    )


def thing_json(rng: random.Random, held: bool) -> Problem:
    """Other small JSON answers: lists, a priced thing, a coloured animal, a pair of numbers."""
    while True:
        items, price = rng.sample(FRUITS + ANIMALS + COLORS, rng.randint(2, 4)), rng.randint(1, 99)
        if held_out("thing", sorted(items), price) == held:
            break
    kind = rng.randrange(4)
    answer: object
    if kind == 0:
        question = rng.choice(
            (
                "Write {x} as a JSON list.",
                "Give a JSON array of these words: {x}.",
                "Make a JSON list from {x}.",
            )
        ).format(x=joined(items))
        answer = items
    elif kind == 1:
        fruit = rng.choice(FRUITS)
        question = f"Give a JSON object with item and price: a {fruit} costs {price}."
        answer = {"item": fruit, "price": price}
    elif kind == 2:
        animal, color = rng.choice(ANIMALS), rng.choice(COLORS)
        question = f"Give a JSON object with animal and color for a {color} {animal}."
        answer = {"animal": animal, "color": color}
    else:
        numbers = rng.sample(range(100), rng.randint(2, 5))
        question, answer = f"Write the numbers {joined(numbers)} as a JSON list.", numbers
    return Problem(
        "JSON objects",
        vary(rng, question),
        json.dumps(answer),
        "The answer is a JSON value and nothing else.",
    )


MAKERS: dict[str, Maker] = {
    "calendar": calendar,
    "fact": fact,
    "person_json": person_json,
    "thing_json": thing_json,
}
# Small closed sets that are learnt, not generalised; scored as seen facts
UNSPLIT_TASKS = ("days and months", "facts")
