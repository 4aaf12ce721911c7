"""Tool definitions that conversations offer, and the questions that call for them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from examples.demo_model.arithmetic import PHRASES, hard_product
from examples.demo_model.lexicon import CAPITALS, CITIES, NAMES, OBJECTS
from examples.demo_model.problem import vary

WEATHER = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear")


@dataclass(frozen=True)
class Errand:
    """A question that needs tools: the calls in order, the tools' answers in the same order, and
    the final reply."""

    question: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    results: tuple[str, ...]
    reply: str


def tool(
    name: str, description: str, required: tuple[str, ...] | None = None, **properties: Any
) -> dict[str, Any]:
    """An OpenAI function tool whose properties are type names or (type, description) pairs."""
    schema = {}
    for key, value in properties.items():
        kind, about = value if isinstance(value, tuple) else (value, "")
        schema[key] = {"type": kind, "description": about} if about else {"type": kind}
    parameters = {
        "type": "object",
        "properties": schema,
        "required": list(required if required is not None else properties),
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def calculator(rng: random.Random) -> dict[str, Any]:
    """The calculator under one of its descriptions."""
    about = rng.choice(
        (
            "Evaluate an arithmetic expression.",
            "A calculator.",
            "Calculate",
            "Evaluates arithmetic",
            "Compute the value of an expression.",
        )
    )
    hint = rng.choice(
        (
            "",
            "",
            "The expression, for example 2 + 3",
            "An arithmetic expression",
            "Expression to evaluate",
        )
    )
    return tool(
        rng.choice(("calculator",) * 6 + ("calculate", "calc")), about, expression=("string", hint)
    )


def weather(rng: random.Random) -> dict[str, Any]:
    """The weather tool; the place is called city or location."""
    about = rng.choice(
        (
            "Get the weather.",
            "Get the current weather in a city.",
            "Get weather",
            "Get the current weather in a given location",
            "The weather of a place.",
        )
    )
    key = rng.choice(("city", "location", "location"))
    hint = rng.choice(
        (
            "",
            "",
            "City name",
            "The city",
            "The city, e.g. Paris",
            "The city to find the weather for",
        )
    )
    name = rng.choice(("get_weather",) * 4 + ("get_current_weather", "weather"))
    if rng.random() < 0.3:
        made = tool(name, about, (key,), **{key: ("string", hint), "unit": "string"})
        made["function"]["parameters"]["properties"]["unit"]["enum"] = ["celsius", "fahrenheit"]
        return made
    return tool(name, about, **{key: ("string", hint)})


def other(rng: random.Random) -> dict[str, Any]:
    """Tools with one text argument, to learn to copy names from the prompt."""
    verb, about, key = rng.choice(
        (
            ("time", "Get the time in a city.", "city"),
            ("search", "Search the web.", "query"),
            ("lookup", "Look up a word.", "word"),
            ("translate", "Translate a word.", "word"),
            ("population", "Get the population of a city.", "city"),
            ("price", "Get the price of a thing.", "item"),
        )
    )
    name = rng.choice((verb, f"get_{verb}", f"{verb}_tool", f"find_{verb}"))
    return tool(name, rng.choice((about, about, "")), **{key: "string"})


def shuffled(rng: random.Random, needed: dict[str, Any]) -> list[dict[str, Any]]:
    """The needed tool, alone or among others of different names."""
    tools = {needed["function"]["name"]: needed}
    if rng.random() < 0.4:
        for extra in (calculator(rng), weather(rng), other(rng))[: rng.randint(1, 3)]:
            kinds = {t["function"]["name"].split("_")[-1][:4] for t in tools.values()}
            if extra["function"]["name"].split("_")[-1][:4] not in kinds:
                tools[extra["function"]["name"]] = extra
    made = list(tools.values())
    rng.shuffle(made)
    return made


def calculation(rng: random.Random, held: bool) -> tuple[list[dict[str, Any]], Errand]:
    """A hard product (or a large sum) for the calculator."""
    needed = calculator(rng)
    operation, sign = "multiply", "*"
    if rng.random() < 0.75:
        a, b = hard_product(rng, held)
    else:
        operation, sign = rng.choice((("multiply", "*"), ("add", "+"), ("subtract", "-")))
        a, b = rng.randint(1000, 99999), rng.randint(100, 99999)
    value = {"*": a * b, "+": a + b, "-": a - b}[sign]
    question = vary(rng, rng.choice(PHRASES[operation]).format(a=a, b=b))
    if rng.random() < 0.25:
        question += rng.choice((" Use the calculator.", " Use the tool.", " Use a tool."))
    expression = f"{a} {sign} {b}"
    if operation == "subtract":
        expression = f"{a} - {b}"
    result = rng.choice(
        (str(value), str(value), json.dumps({"result": value}), f"{expression} = {value}")
    )
    return shuffled(rng, needed), Errand(
        question, ((needed["function"]["name"], {"expression": expression}),), (result,), str(value)
    )


def forecast(rng: random.Random, held: bool) -> tuple[list[dict[str, Any]], Errand]:
    """The weather of one or two cities; two need two calls."""
    needed = weather(rng)
    function = needed["function"]
    key = function["parameters"]["required"][0]
    unit = (
        rng.choice(("celsius", "fahrenheit"))
        if "unit" in function["parameters"]["properties"] and rng.random() < 0.5
        else None
    )
    cities = rng.sample(CITIES, 2 if rng.random() < 0.2 else 1)
    phrases = (
        "What is the weather in {c}?",
        "What's the weather in {c}?",
        "What's the weather like in {c}?",
        "How is the weather in {c}?",
        "Weather in {c}?",
        "Tell me the weather in {c}.",
        "What is the weather like in {c} today?",
        "Get the weather in {c}.",
        "Is it raining in {c}?",
    )
    question = vary(rng, rng.choice(phrases).format(c=" and ".join(cities)))
    if unit:
        question = question.rstrip("?.") + f" in {unit}?"
    calls, results, replies = [], [], []
    for city in cities:
        degrees, sky = rng.randint(-10, 40), rng.choice(WEATHER)
        calls.append((function["name"], {key: city} | ({"unit": unit} if unit else {})))
        results.append(
            rng.choice(
                (
                    f"{degrees} degrees, {sky}",
                    json.dumps({"temperature": degrees, "condition": sky}),
                    f"{sky}, {degrees} degrees",
                    f"{sky}, {degrees}",
                )
            )
        )
        replies.append(f"In {city} it is {degrees} degrees and {sky}.")
    return shuffled(rng, needed), Errand(question, tuple(calls), tuple(results), " ".join(replies))


def lookup(rng: random.Random, held: bool) -> tuple[list[dict[str, Any]], Errand]:
    """One of the other tools, with a word or city as its argument."""
    needed = other(rng)
    function = needed["function"]
    (key,) = function["parameters"]["properties"]
    subject = (
        rng.choice(CITIES)
        if key == "city"
        else rng.choice(OBJECTS + NAMES + tuple(city for _, city in CAPITALS))
    )
    use = function["name"]
    phrases = (
        f"Use {use} for {subject}.",
        f"Call {use} with {subject}.",
        f"Use the {use} tool on {subject}.",
        f"Please use {use}: {subject}",
    )
    result = rng.choice(
        (
            f"{rng.randint(1, 12)}:{rng.randint(10, 59)}",
            str(rng.randint(1, 9999)),
            rng.choice(OBJECTS),
            f"{rng.choice(OBJECTS)} of {rng.choice(OBJECTS)}",
        )
    )
    return shuffled(rng, needed), Errand(
        rng.choice(phrases), ((use, {key: subject}),), (result,), f"The answer is {result}."
    )


ERRANDS = {"calculation": calculation, "forecast": forecast, "lookup": lookup}
