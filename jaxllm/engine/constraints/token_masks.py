"""The masks of a step's constrained requests, found while the device computes. Imports no jax."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.scheduling.request import Request
from jaxllm.sampling.bits import nothing_but
from jaxllm.sampling.constraint import ConstraintError

logger = logging.getLogger("jaxllm")

NONE_ALLOWED = "the request's constraints allow no token here"
NO_TOKEN = "no token can be drawn: the model's logits are not finite, or the request's options leave no token"
HELD_BACK = (
    "no token can be drawn: those that may come next stop the request, which min_tokens forbids"
)


def token_bitmask(
    guides: Grammars, requests: Sequence[Request], allowed_RW: np.ndarray
) -> list[tuple[int, str]]:
    """Write the packed bits of what each request may say next, and tell of which rows and why there
    is nothing: whatever constraints raise ends their own request alone."""
    if guides.token_bitmask(requests, allowed_RW):
        return []
    found = [(row, _mask(guides, request, allowed_RW[row])) for row, request in enumerate(requests)]
    return [(row, why) for row, why in found if why is not None]


def advance(request: Request, token_ids: Sequence[int]) -> str | None:
    """Tell a request's constraints what it has said; the text that ends the request when one fails,
    or its grammar has."""
    assert request.asked is not None
    try:
        for constraint in request.asked.constraints:
            constraint.advance(token_ids)
    except Exception as error:
        return _why(error)
    return None if request.guide is None else request.guide.failed


def _mask(guides: Grammars, request: Request, allowed_W: np.ndarray) -> str | None:
    assert request.asked is not None
    allowed_W[:] = request.asked.allowed_W
    try:
        for constraint in request.asked.constraints:
            constraint.mask(allowed_W)
        if request.guide is not None:
            guides.mask(request, allowed_W)  # last: it knows whether the text may end here
    except Exception as error:
        return _why(error)
    if not allowed_W.any():
        return NONE_ALLOWED
    held_back = len(request.output) < request.params.min_tokens and nothing_but(
        allowed_W, request.stops
    )
    return HELD_BACK if held_back else None


def _why(error: Exception) -> str:
    if isinstance(error, ConstraintError):
        return str(error)
    logger.exception("a constraint failed", exc_info=error)
    return "a constraint failed"
