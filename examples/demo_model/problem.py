"""The unit of generated text (`Problem`) and the split between training and held-out problems."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

HELD_OUT_SHARE = 10  # one problem in ten is never trained on


@dataclass(frozen=True)
class Problem:
    """One question with its only right answer; `thought` is what is said between the think tags
    when thinking is on."""

    task: str
    question: str
    answer: str
    thought: str


# (rng, held_out) -> a problem from that side of the split
Maker = Callable[[random.Random, bool], Problem]


def held_out(*key: object) -> bool:
    """Whether the problem named by `key` (task and operands, never the phrasing) belongs to the
    held-out set."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def pair_held_out(operation: str, a: int, b: int) -> bool:
    """Split of arithmetic by operand pair. Both orders fall on one side; single-digit facts are
    always trained on."""
    if max(a, b) < 10 or (operation == "multiply" and max(a, b) <= 12):
        return False
    return held_out(operation, min(a, b), max(a, b))


def vary(rng: random.Random, question: str) -> str:
    """The same question as people type it: polite, in a hurry, without a capital or its question
    mark.
    """
    if rng.random() < 0.12:
        question = (
            rng.choice(
                (
                    "Please ",
                    "Hey, ",
                    "Quick question: ",
                    "Can you help me? ",
                    "Hi! ",
                    "OK, ",
                    "Now ",
                    "Tell me: ",
                )
            )
            + question
        )
    if rng.random() < 0.12:
        question = question[0].lower() + question[1:]
    if question[-1] in "?." and rng.random() < 0.2:
        question = question[:-1]
    if rng.random() < 0.06:
        question += rng.choice(
            (
                " Thanks!",
                " Please.",
                " Answer briefly.",
                " Just the answer.",
                " Give only the answer.",
            )
        )
    return question
