"""Problems about words and letters: sorting, reversing, spelling, counting, copying."""

from __future__ import annotations

import random
import string

from examples.demo_model.lexicon import (
    ADJECTIVES,
    ANIMALS,
    COLORS,
    FRUITS,
    JOBS,
    NAMES,
    OBJECTS,
    WORDS,
)
from examples.demo_model.lists import joined
from examples.demo_model.problem import Maker, Problem, held_out, vary


def pick_word(rng: random.Random, held: bool, task: str) -> str:
    """A real word, or now and then invented letters; words decide the split."""
    while True:
        if rng.random() < 0.8:
            word = rng.choice(WORDS)
        else:
            word = "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(2, 7)))
        if held_out(task, word) == held:
            return word


def sentence(rng: random.Random) -> str:
    """A short sentence out of the word lists."""
    animal, thing = rng.choice(ANIMALS), rng.choice(OBJECTS)
    forms = (
        f"The {rng.choice(ADJECTIVES)} {animal} sees a {thing}",
        f"{rng.choice(NAMES)} likes {rng.choice(COLORS)} and {rng.choice(COLORS)}",
        f"A {rng.choice(JOBS)} eats a {rng.choice(FRUITS)}",
        f"My {thing} is {rng.choice(ADJECTIVES)}",
        f"The {animal} and the {rng.choice(ANIMALS)} play near the {thing}",
        f"{rng.choice(NAMES)} has {rng.randint(2, 99)} {rng.choice(ANIMALS)}s",
        " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 6))),
    )
    return rng.choice(forms)


def sort_words(rng: random.Random, held: bool) -> Problem:
    """Three to five words into alphabetical order."""
    while True:
        words = rng.sample(rng.choice((WORDS, FRUITS, ANIMALS, COLORS)), rng.choice((3, 3, 4, 5)))
        if held_out("sort words", sorted(words)) == held:
            break
    phrases = (
        "Sort these words: {x}",
        "Sort these words alphabetically: {x}",
        "Sort {x} alphabetically.",
        "Put these words in alphabetical order: {x}.",
        "Order these words from A to Z: {x}",
        "Alphabetize: {x}",
    )
    order = sorted(words)
    thought = (
        "First letters: "
        + ", ".join(f"{w[0]} for {w}" for w in words)
        + f". {order[0]} comes first and {order[-1]} last."
    )
    return Problem(
        "sorting words",
        vary(rng, rng.choice(phrases).format(x=joined(words))),
        joined(order),
        thought,
    )


def reverse(rng: random.Random, held: bool) -> Problem:
    """A word spelled backwards."""
    word = pick_word(rng, held, "letters")
    phrases = (
        "Reverse the word {w}.",
        "Reverse {w}.",
        "Spell {w} backwards.",
        "Write {w} backwards.",
        'Reverse the string "{w}".',
        "What is {w} reversed?",
        "Reverse: {w}",
        "Reverse the letters of {w}.",
    )
    thought = f"The letters are {' '.join(word)}. Backwards: {' '.join(word[::-1])}."
    return Problem(
        "reversing a word", vary(rng, rng.choice(phrases).format(w=word)), word[::-1], thought
    )


def reverse_list(rng: random.Random, held: bool) -> Problem:
    """The order of a list turned round."""
    while True:
        items: list[object] = (
            list(rng.sample(WORDS, rng.randint(2, 5)))
            if rng.random() < 0.6
            else list(rng.sample(range(100), rng.randint(3, 6)))
        )
        if held_out("reverse list", tuple(items)) == held:
            break
    phrases = (
        "Reverse the order of these: {x}",
        "Reverse this list: {x}",
        "List these in reverse order: {x}.",
        "Reverse the list {x}.",
    )
    thought = f"The last is {items[-1]}, the first is {items[0]}."
    return Problem(
        "reversing a list",
        vary(rng, rng.choice(phrases).format(x=joined(items))),
        joined(items[::-1]),
        thought,
    )


def spell(rng: random.Random, held: bool) -> Problem:
    """Letters of a word, one by one."""
    word = pick_word(rng, held, "letters")
    phrases = (
        "Spell {w}.",
        "Spell the word {w}.",
        "How do you spell {w}?",
        "List the letters of {w}.",
        "Can you spell {w}?",
    )
    return Problem(
        "spelling",
        vary(rng, rng.choice(phrases).format(w=word)),
        "-".join(word),
        f"{word} has the letters {' '.join(word)}.",
    )


def count_letter(rng: random.Random, held: bool) -> Problem:
    """How often a letter occurs in a word."""
    word = pick_word(rng, held, "count letter")
    letter = rng.choice(word) if rng.random() < 0.85 else rng.choice(string.ascii_lowercase)
    phrases = (
        "How many {l}s are in {w}?",
        "How many times does {l} appear in {w}?",
        "How many {l}'s are there in {w}?",
        'How many "{l}" are in "{w}"?',
        "How many letters {l} does {w} have?",
        "Count the letter {l} in {w}.",
        "How many {l}s are in the word {w}?",
    )
    marked = ", ".join(
        f"{c} ({word[: i + 1].count(letter)})" if c == letter else c for i, c in enumerate(word)
    )
    thought = f"{marked}. That is {word.count(letter)}."
    return Problem(
        "counting a letter",
        vary(rng, rng.choice(phrases).format(l=letter, w=word)),
        str(word.count(letter)),
        thought,
    )


def length(rng: random.Random, held: bool) -> Problem:
    """How many letters a word has."""
    word = pick_word(rng, held, "length")
    phrases = (
        "How many letters are in {w}?",
        "How many letters does {w} have?",
        "How long is the word {w}?",
        "Count the letters in {w}.",
    )
    thought = ", ".join(f"{c} {i}" for i, c in enumerate(word, 1)) + "."
    return Problem(
        "word length", vary(rng, rng.choice(phrases).format(w=word)), str(len(word)), thought
    )


def copy(rng: random.Random, held: bool) -> Problem:
    """Say exactly what was said."""
    while True:
        text = sentence(rng)
        if held_out("copy", text) == held:
            break
    phrases = (
        "Repeat after me: {t}",
        "Say: {t}",
        "Copy this: {t}",
        'Repeat this exactly: "{t}"',
        "Please repeat: {t}",
        "Echo: {t}",
        'Say "{t}"',
    )
    return Problem("copying", rng.choice(phrases).format(t=text), text, f"I repeat: {text}")


def repeat(rng: random.Random, held: bool) -> Problem:
    """One word several times, or its capitals, first or last letter."""
    word = pick_word(rng, held, "repeat")
    kind = rng.randrange(4)
    if kind == 0:
        times = rng.randint(2, 9)
        phrases = ("Repeat the word {w} {n} times.", "Say {w} {n} times.", "Write {w} {n} times.")
        return Problem(
            "repeating",
            vary(rng, rng.choice(phrases).format(w=word, n=times)),
            " ".join([word] * times),
            f"I write {word} {times} times.",
        )
    if kind == 1:
        phrases = ("Write {w} in uppercase.", "Write {w} in capital letters.", "Uppercase {w}.")
        return Problem(
            "capitals",
            vary(rng, rng.choice(phrases).format(w=word)),
            word.upper(),
            f"The letters are {' '.join(word.upper())}.",
        )
    first = kind == 2
    question = f"What is the {'first' if first else 'last'} letter of {word}?"
    return Problem(
        "first and last letter",
        vary(rng, question),
        word[0] if first else word[-1],
        f"The letters are {' '.join(word)}.",
    )


MAKERS: dict[str, Maker] = {
    "sort_words": sort_words,
    "reverse": reverse,
    "reverse_list": reverse_list,
    "spell": spell,
    "count_letter": count_letter,
    "length": length,
    "copy": copy,
    "repeat": repeat,
}
