"""Arguments and results of tools, drawn at random: most must be copied, few can be remembered."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from examples.demo_model.lexicon import (
    ADJECTIVES,
    ANIMALS,
    COLORS,
    FRUITS,
    NAMES,
    OBJECTS,
    WORDS,
)

Draw = Callable[[random.Random], Any]

ROOMS = "kitchen bedroom bathroom garage garden hall office cellar".split()
FOLDERS = "notes src docs data tests photos music".split()
ENDINGS = "txt md py csv json".split()
SIZES = ("small", "medium", "large")
CURRENCIES = "EUR USD GBP JPY CHF".split()
UNITS = "km miles meters feet kg pounds grams liters".split()
LANGUAGES = "French German Spanish Italian Dutch Polish Greek Turkish".split()
GENRES = "jazz rock pop folk blues opera".split()
LETTERS = "ABCDEFGHKLMNPRSTUVWX"


def one_of(*lists: Any) -> Draw:
    """An item of the lists."""
    items = [item for part in lists for item in part]
    return lambda rng: rng.choice(items)


def number(low: int, high: int) -> Draw:
    """An integer, low and high included."""
    return lambda rng: rng.randint(low, high)


def decimal(rng: random.Random) -> float:
    """A number with one digit behind the point, which is never 0."""
    return rng.randint(1, 400) + rng.randint(1, 9) / 10


def day(rng: random.Random) -> str:
    """A date."""
    return f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def clock(rng: random.Random) -> str:
    """A time of day."""
    return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"


def code(rng: random.Random) -> str:
    """An identifier such as K4-817."""
    return f"{rng.choice(LETTERS)}{rng.randint(1, 9)}-{rng.randint(100, 999)}"


def symbol(rng: random.Random) -> str:
    """The three or four letters of a share."""
    return "".join(rng.choices(LETTERS, k=rng.choice((3, 4))))


def path(rng: random.Random) -> str:
    """A path of a file."""
    return f"{rng.choice(FOLDERS)}/{rng.choice(WORDS)}.{rng.choice(ENDINGS)}"


def email(rng: random.Random) -> str:
    """A mail address."""
    return f"{rng.choice(NAMES).lower()}@{rng.choice(WORDS)}.{rng.choice(('com', 'org', 'net'))}"


def title(rng: random.Random) -> str:
    """A few words that name a thing."""
    words = [rng.choice(ADJECTIVES), rng.choice(OBJECTS + ANIMALS)]
    return " ".join(words if rng.random() < 0.6 else [rng.choice(COLORS), *words[1:]])


def command(rng: random.Random) -> str:
    """A line for a shell."""
    return rng.choice(("ls {}", "cat {}", "wc -l {}", "rm {}", "head {}")).format(path(rng))


def words_of(low: int, high: int) -> Draw:
    """A list of different words."""
    return lambda rng: rng.sample(WORDS, rng.randint(low, high))


def numbers_of(low: int, high: int) -> Draw:
    """A list of numbers."""
    return lambda rng: [rng.randint(1, 99) for _ in range(rng.randint(low, high))]


def invented(rng: random.Random) -> str:
    """A word of no language, such as a user's own names."""
    syllables = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)]
    return "".join(syllables[: rng.choice((2, 3))]) + rng.choice(("", "x", "n", "r"))


thing = one_of(OBJECTS[:60], FRUITS, ANIMALS)
person = one_of(NAMES)
