"""Problems about numbers without arithmetic: order, comparison, counting, sequences, numerals in
words."""

from __future__ import annotations

import random

from examples.demo_model.lexicon import TENS, UNITS
from examples.demo_model.problem import Maker, Problem, held_out, pair_held_out, vary


def joined(items: list[object]) -> str:
    """Items as the answers list them."""
    return ", ".join(str(item) for item in items)


def in_words(n: int) -> str:
    """English words of 0 ≤ n ≤ 999."""
    if n < 20:
        return UNITS[n]
    if n < 100:
        return TENS[n // 10] + (f"-{UNITS[n % 10]}" if n % 10 else "")
    return f"{UNITS[n // 100]} hundred" + (f" and {in_words(n % 100)}" if n % 100 else "")


def sort_numbers(rng: random.Random, held: bool) -> Problem:
    """Three to seven distinct numbers into order."""
    while True:
        numbers = rng.sample(
            range(100 if rng.random() < 0.85 else 1000), rng.choice((3, 3, 4, 4, 5, 5, 6, 7))
        )
        if held_out("sort", sorted(numbers)) == held:
            break
    down = rng.random() < 0.25
    if down:
        phrases = (
            "Sort these numbers in descending order: {x}",
            "Sort from largest to smallest: {x}.",
            "Order {x} from high to low.",
        )
    else:
        phrases = (
            "Sort these numbers: {x}",
            "Sort {x}.",
            "Sort the numbers {x}.",
            "Put these numbers in order: {x}",
            "Sort in ascending order: {x}",
            "Order these numbers from smallest to largest: {x}.",
            "Arrange {x} from low to high.",
            "Sort the list [{x}].",
        )
    left, order, steps = list(numbers), sorted(numbers, reverse=down), []
    for pick in order[:-1]:
        steps.append(f"the {'largest' if down else 'smallest'} of {joined(left)} is {pick}")
        left.remove(pick)
    thought = "; ".join(steps) + f"; {left[0]} is left."
    return Problem(
        "sorting numbers",
        vary(rng, rng.choice(phrases).format(x=joined(numbers))),
        joined(order),
        thought,
    )


def compare(rng: random.Random, held: bool) -> Problem:
    """Two different numbers: the larger, the smaller, or a yes/no question."""
    while True:
        top = rng.choice((20, 100, 100, 1000))
        a, b = rng.randrange(top), rng.randrange(top)
        if (
            a != b
            and (held_out("compare", min(a, b), max(a, b)) if max(a, b) >= 10 else False) == held
        ):
            break
    relation = f"{a} is {'greater' if a > b else 'less'} than {b}."
    if rng.random() < 0.6:
        big = rng.random() < 0.6
        words = (
            ("larger", "bigger", "greater", "the larger number")
            if big
            else ("smaller", "less", "the smaller number")
        )
        phrases = (
            "Which is {w}, {a} or {b}?",
            "Which number is {w}: {a} or {b}?",
            "{a} or {b}: which is {w}?",
        )
        question = rng.choice(phrases).format(w=rng.choice(words), a=a, b=b)
        return Problem(
            "comparison", vary(rng, question), str(max(a, b) if big else min(a, b)), relation
        )
    phrases = (
        ("Is {a} greater than {b}?", a > b),
        ("Is {a} less than {b}?", a < b),
        ("Is {a} larger than {b}?", a > b),
        ("Is {a} > {b}?", a > b),
    )
    phrase, truth = rng.choice(phrases)
    return Problem(
        "comparison", vary(rng, phrase.format(a=a, b=b)), "Yes" if truth else "No", relation
    )


def extreme(rng: random.Random, held: bool) -> Problem:
    """Largest or smallest of a short list."""
    while True:
        numbers = rng.sample(range(100), rng.randint(3, 6))
        if held_out("extreme", sorted(numbers)) == held:
            break
    big = rng.random() < 0.5
    word = rng.choice(
        ("largest", "maximum", "biggest", "highest") if big else ("smallest", "minimum", "lowest")
    )
    question = rng.choice(
        (
            "What is the {w} of {x}?",
            "Find the {w} number: {x}",
            "Which is the {w}: {x}?",
            "Give the {w} of these: {x}.",
        )
    )
    pick = max(numbers) if big else min(numbers)
    thought = f"I look through {joined(numbers)}. The {word} is {pick}."
    return Problem(
        "largest and smallest",
        vary(rng, question.format(w=word, x=joined(numbers))),
        str(pick),
        thought,
    )


def count(rng: random.Random, held: bool) -> Problem:
    """Count between two numbers, up or down, possibly in steps."""
    while True:
        start, length, stride = (
            rng.choice((1, 1, rng.randint(0, 80))),
            rng.randint(3, 24),
            rng.choice((1, 1, 1, 1, 2, 5, 10)),
        )
        stop = start + (length - 1) * stride
        famous = start == 1 and stride == 1 and stop % 5 == 0
        if (not famous and held_out("count", start, stop, stride)) == held:
            break
    numbers = list(range(start, stop + 1, stride))
    if stride > 1:
        question = f"Count from {start} to {stop} in steps of {stride}."
    elif rng.random() < 0.15:
        question, numbers = f"Count down from {stop} to {start}.", numbers[::-1]
    else:
        phrases = [
            "Count from {a} to {b}.",
            "Can you count from {a} to {b}?",
            "List the numbers from {a} to {b}.",
        ]
        question = rng.choice(phrases + ["Count to {b}."] * 2 * (start == 1)).format(
            a=start, b=stop
        )
    return Problem(
        "counting",
        vary(rng, question),
        joined(numbers),
        f"I start at {numbers[0]} and stop at {numbers[-1]}.",
    )


def sequence(rng: random.Random, held: bool) -> Problem:
    """The neighbour of a number, or the next term of an arithmetic sequence."""
    while True:
        n = rng.randint(1, 300)
        if (n >= 10 and held_out("next", n)) == held:
            break
    if rng.random() < 0.6:
        after = rng.random() < 0.6
        phrases = (
            "What comes {w} {n}?",
            "Which number comes {w} {n}?",
            "What number is right {w} {n}?",
        )
        question = rng.choice(phrases).format(w="after" if after else "before", n=n)
        return Problem(
            "sequences",
            vary(rng, question),
            str(n + 1 if after else n - 1),
            f"I count {n - 1}, {n}, {n + 1}.",
        )
    stride = rng.choice((1, 2, 2, 3, 5, 10))
    terms = [n + i * stride for i in range(5)]
    phrases = (
        "What comes next: {x}, ...?",
        "Continue the sequence: {x}",
        "What is the next number: {x}?",
    )
    return Problem(
        "sequences",
        vary(rng, rng.choice(phrases).format(x=joined(terms[:4]))),
        str(terms[4]),
        f"Each term is {stride} more.",
    )


def parity(rng: random.Random, held: bool) -> Problem:
    """Even or odd."""
    while True:
        n = rng.randint(0, 999)
        if (n >= 10 and held_out("parity", n)) == held:
            break
    thought = f"{n} ends in {n % 10}, which is {'even' if n % 2 == 0 else 'odd'}."
    if rng.random() < 0.5:
        return Problem(
            "even and odd", vary(rng, f"Is {n} even or odd?"), "Odd" if n % 2 else "Even", thought
        )
    want = rng.random() < 0.5
    return Problem(
        "even and odd",
        vary(rng, f"Is {n} {'even' if want else 'odd'}?"),
        "Yes" if (n % 2 == 0) == want else "No",
        thought,
    )


def numerals(rng: random.Random, held: bool) -> Problem:
    """Digits to words and back."""
    while True:
        n = rng.randint(0, 99) if rng.random() < 0.6 else rng.randint(100, 999)
        if (n >= 20 and held_out("numerals", n)) == held:
            break
    words = in_words(n)
    if rng.random() < 0.6:
        phrases = (
            "Write {n} in words.",
            "How do you write {n} in words?",
            "Spell out the number {n}.",
        )
        return Problem(
            "numbers in words",
            vary(rng, rng.choice(phrases).format(n=n)),
            words,
            f"{n} reads {words}.",
        )
    phrases = ("Write {w} in digits.", "Write the number {w} as digits.", "What is {w} in digits?")
    return Problem(
        "numbers in words",
        vary(rng, rng.choice(phrases).format(w=words)),
        str(n),
        f"{words} is {n}.",
    )


def small_sum(rng: random.Random, held: bool) -> Problem:
    """Sum of three or four single digits."""
    while True:
        numbers = [rng.randint(1, 9) for _ in range(rng.choice((3, 3, 4)))]
        totals = [sum(numbers[:i]) for i in range(1, len(numbers) + 1)]
        leaks = any(
            pair_held_out("add", total, n) for total, n in zip(totals, numbers[1:], strict=False)
        )
        if not leaks and held_out("small sum", sorted(numbers)) == held:
            break
    phrases = (
        "What is {x}?",
        "{x}",
        "{x} =",
        "Calculate {x}.",
        "Add {l}.",
        "What is the sum of {l}?",
    )
    question = vary(
        rng, rng.choice(phrases).format(x=" + ".join(map(str, numbers)), l=joined(numbers))
    )
    steps = "; ".join(
        f"{total} + {n} = {total + n}" for total, n in zip(totals, numbers[1:], strict=False)
    )
    return Problem("sums of several digits", question, str(sum(numbers)), steps + ".")


MAKERS: dict[str, Maker] = {
    "sort_numbers": sort_numbers,
    "compare": compare,
    "extreme": extreme,
    "count": count,
    "sequence": sequence,
    "parity": parity,
    "numerals": numerals,
    "small_sum": small_sum,
}
