"""Arithmetic problems: sums, differences, products, quotients, with the steps that lead to each
answer."""

from __future__ import annotations

import random

from examples.demo_model.lexicon import NAMES
from examples.demo_model.problem import Maker, Problem, pair_held_out, vary

TOO_HARD = (
    "That product is too hard for me to do at once. Give me a calculator tool, or turn on thinking."
)

PHRASES = {
    "add": (
        "What is {a} + {b}?",
        "{a} + {b}",
        "{a} + {b} =",
        "{a}+{b}",
        "{a}+{b}=?",
        "What's {a}+{b}?",
        "What is {a} plus {b}?",
        "Calculate {a} + {b}.",
        "Compute {a} + {b}.",
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "How much is {a} + {b}?",
        "{a} plus {b}",
        "Work out {a} + {b}.",
        "Solve {a} + {b}.",
        "{a} + {b} = ?",
        "Can you add {a} and {b}?",
        "What do you get if you add {a} to {b}?",
        "What is {a}+{b}?",
        "What does {a} + {b} equal?",
        "Answer with the number only: {a} + {b}",
        "How much is {a} and {b} together?",
        "Evaluate {a} + {b}.",
    ),
    "subtract": (
        "What is {a} - {b}?",
        "{a} - {b}",
        "{a} - {b} =",
        "{a}-{b}",
        "What's {a}-{b}?",
        "What is {a} minus {b}?",
        "Calculate {a} - {b}.",
        "Compute {a} - {b}.",
        "Subtract {b} from {a}.",
        "What is the difference of {a} and {b}?",
        "How much is {a} - {b}?",
        "{a} minus {b}",
        "Take {b} away from {a}.",
        "Solve {a} - {b}.",
        "{a} - {b} = ?",
        "What is {a}-{b}?",
        "What does {a} - {b} equal?",
    ),
    "multiply": (
        "What is {a} * {b}?",
        "{a} * {b}",
        "{a} * {b} =",
        "{a}*{b}",
        "What's {a}*{b}?",
        "What is {a} times {b}?",
        "Calculate {a} * {b}.",
        "Compute {a} * {b}.",
        "Multiply {a} by {b}.",
        "Multiply {a} and {b}.",
        "What is the product of {a} and {b}?",
        "How much is {a} x {b}?",
        "{a} times {b}",
        "What is {a} x {b}?",
        "{a} x {b} =",
        "{a} \u00d7 {b}",
        "Solve {a} * {b}.",
        "What does {a} * {b} equal?",
        "What is {a}*{b}?",
        "What is {a} multiplied by {b}?",
    ),
    "divide": (
        "What is {a} / {b}?",
        "{a} / {b}",
        "{a} / {b} =",
        "{a}/{b}",
        "What is {a} divided by {b}?",
        "Calculate {a} / {b}.",
        "Divide {a} by {b}.",
        "How many times does {b} go into {a}?",
        "How much is {a} / {b}?",
        "What's {a}/{b}?",
        "Compute {a} / {b}.",
    ),
}

STORIES = {
    "add": (
        "{name} has {a} apples and gets {b} more. How many apples does {name} have now?",
        "There are {a} red balls and {b} blue balls in a box. How many balls are in the box?",
        "{name} reads {a} pages today and {b} pages tomorrow. How many pages is that in total?",
    ),
    "subtract": (
        "{name} has {a} coins and gives away {b}. How many coins are left?",
        "A bus has {a} seats and {b} are taken. How many seats are free?",
        "{name} baked {a} cakes and sold {b}. How many cakes remain?",
    ),
    "multiply": (
        "A box holds {a} pens. How many pens are in {b} boxes?",
        "{name} walks {a} km every day. How many km is that in {b} days?",
    ),
    "divide": ("{name} shares {a} sweets equally among {b} friends. How many does each get?",),
}


def add_steps(a: int, b: int) -> str:
    """Column addition from the ones, carries said aloud."""
    width = max(len(str(a)), len(str(b)))
    carry, steps = 0, []
    for place in range(width):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        terms = f"{x} + {y}" + (f" + {carry}" if carry else "")
        carry = total // 10
        steps.append(f"{terms} = {total}" + (", carry 1" if carry else ""))
    return f"{a} + {b}: " + "; ".join(steps) + f". So {a} + {b} = {a + b}."


def subtract_steps(a: int, b: int) -> str:
    """Column subtraction from the ones with borrows; a smaller minuend is turned round first."""
    if a < b:
        return (
            f"{a} is less than {b}, so the answer is negative. {subtract_steps(b, a)} So {a} - "
            f"{b} = {a - b}."
        )
    borrow, steps = 0, []
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10 + borrow
        borrow = int(x < y)
        steps.append(
            f"{x + 10 * borrow} - {y} = {x + 10 * borrow - y}" + (", borrow 1" if borrow else "")
        )
    return f"{a} - {b}: " + "; ".join(steps) + f". So {a} - {b} = {a - b}."


def multiply_steps(a: int, b: int) -> str:
    """Long multiplication: one partial product for each digit of the smaller operand, then their
    sum.
    """
    a, b = max(a, b), min(a, b)
    tens, ones = b // 10 * 10, b % 10
    if tens == 0 or ones == 0:
        return f"{a} * {b} = {a * b}."
    return (
        f"{a} * {b} = {a} * {tens} + {a} * {ones}. {a} * {tens} = {a * tens}. {a} * {ones} = "
        f"{a * ones}. "
        f"{add_steps(a * tens, a * ones)} So {a} * {b} = {a * b}."
    )


def divide_steps(a: int, b: int) -> str:
    """Division without remainder, by the product that proves it."""
    return f"{b} * {a // b} = {a}, so {a} / {b} = {a // b}."


def operands(rng: random.Random, operation: str) -> tuple[int, int]:
    """Operands of a direct question; two-digit pairs are the bulk."""
    shape = rng.random()
    if operation in ("add", "subtract"):
        if shape < 0.62:
            return rng.randint(10, 99), rng.randint(10, 99)
        if shape < 0.80:
            return rng.randint(0, 99), rng.randint(0, 20)
        return rng.randint(10, 999), rng.randint(10, 999)
    if operation == "multiply":
        a, b = (
            (rng.randint(0, 12), rng.randint(0, 12))
            if shape < 0.35
            else (rng.randint(2, 12), rng.randint(10, 99))
        )
        return (a, b) if rng.random() < 0.5 else (b, a)
    b = rng.randint(1, 12)
    return b * rng.randint(1, 20), b


def split_pair(operation: str, a: int, b: int) -> tuple[str, int, int]:
    """The fact that decides the split: a quotient belongs to its product, a negative difference to
    its mirror."""
    return ("multiply", a // b, b) if operation == "divide" else (operation, a, b)


def solve(operation: str, a: int, b: int) -> int:
    """The right answer."""
    return {"add": a + b, "subtract": a - b, "multiply": a * b, "divide": a // b if b else 0}[
        operation
    ]


def problem(rng: random.Random, operation: str, a: int, b: int) -> Problem:
    """Phrase one problem."""
    steps = {
        "add": add_steps,
        "subtract": subtract_steps,
        "multiply": multiply_steps,
        "divide": divide_steps,
    }[operation]
    if rng.random() < 0.08 and (operation != "subtract" or a >= b):
        question = rng.choice(STORIES[operation]).format(a=a, b=b, name=rng.choice(NAMES))
    else:
        question = vary(rng, rng.choice(PHRASES[operation]).format(a=a, b=b))
    digits = {"add": "two-digit addition", "subtract": "two-digit subtraction"}
    task = {"multiply": "multiplication", "divide": "division"}.get(operation, "")
    if not task:
        two = 10 <= a <= 99 and 10 <= b <= 99
        task = (
            digits[operation] if two else {"add": "addition", "subtract": "subtraction"}[operation]
        )
    return Problem(task, question, str(solve(operation, a, b)), steps(a, b))


def leaks(a: int, b: int) -> bool:
    """Whether the steps of a product would show a smaller product that is held out, multiples of
    ten apart (the card says so)."""
    a, b = max(a, b), min(a, b)
    return (
        any(pair_held_out("multiply", a, digit) for digit in (b // 10, b % 10)) if b > 10 else False
    )


def direct(operation: str) -> Maker:
    """A maker of problems of one operation."""

    def make(rng: random.Random, held: bool) -> Problem:
        while True:
            a, b = operands(rng, operation)
            if pair_held_out(*split_pair(operation, a, b)) == held and (
                held or operation != "multiply" or not leaks(a, b)
            ):
                return problem(rng, operation, a, b)

    return make


def hard_product(rng: random.Random, held: bool) -> tuple[int, int]:
    """Two factors of two digits, beyond what the model should try without steps or a tool."""
    while True:
        # A partial sum has three digits, so it teaches no held-out two-digit sum
        a, b = rng.randint(13, 99), rng.randint(13, 99)
        if pair_held_out("multiply", a, b) == held and (held or not leaks(a, b)):
            return a, b


def long_multiplication(rng: random.Random, held: bool) -> Problem:
    """A product to be solved in steps; without thinking the answer is the honest `TOO_HARD`."""
    a, b = hard_product(rng, held)
    question = vary(rng, rng.choice(PHRASES["multiply"]).format(a=a, b=b))
    return Problem("long multiplication (thinking)", question, str(a * b), multiply_steps(a, b))


MAKERS: dict[str, Maker] = {operation: direct(operation) for operation in PHRASES}
