"""Choices of one prompt share its pages: whose pages a request may start from, and how far. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.engine.plan import Chunk
from jaxllm.engine.request import Request, Status


@dataclass(frozen=True, slots=True)
class Loan:
    """The first `tokens` tokens of a request are in the pages of `lender`, which has computed `computed` in all."""

    lender: Request
    tokens: int
    computed: int


def loan(request: Request, newest: Chunk | None) -> Loan | None:
    """What the family of a waiting request has most of; None when no running member has the whole prompt in its pages.

    A step writes the KV of all its tokens before it attends, so what the plan in the making computes counts, `newest` included.
    """
    best = None
    for member in request.family:
        if member.status is not Status.RUNNING or member.arriving:
            continue
        computed = member.computed if newest is None or newest.request is not member else newest.start + newest.length
        if computed < len(request.prompt):
            continue
        tokens = len(request.prompt) + agreeing(request.output, member.output, computed - len(request.prompt))
        if best is None or tokens > best.tokens:
            best = Loan(member, tokens, computed)
        if tokens == request.num_tokens:
            break
    return best


def about_to_grow(family: list[Request], tokens: int) -> int:
    """How many running members hold no page of their own beyond their first `tokens` tokens: the next step of each takes one."""
    return sum(member.status is Status.RUNNING and member.room <= tokens for member in family)


def agreeing(one: list[int], other: list[int], most: int) -> int:
    """How many tokens two outputs have in common at their start, at most `most`."""
    length = min(len(one), len(other), most)
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])
