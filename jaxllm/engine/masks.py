"""The masks of a step's constrained requests, found while the device computes. Imports no jax."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from jaxllm.engine.request import Request
from jaxllm.sampling.constraint import ConstraintError

logger = logging.getLogger("jaxllm")


def mask(request: Request, allowed_W: np.ndarray) -> str | None:
    """Write the packed bits of what a request may say next, or say why it cannot go on: whatever its constraints raise ends that request
    alone."""
    assert request.asked is not None
    allowed_W[:] = request.asked.allowed_W
    try:
        for constraint in request.asked.constraints:
            constraint.mask(allowed_W)
    except Exception as error:
        return _why(error)
    return None if allowed_W.any() else "the request's constraints allow no token here"


def advance(request: Request, token_ids: Sequence[int]) -> str | None:
    """Tell a request's constraints what it has said; the text that ends the request when one fails."""
    assert request.asked is not None
    try:
        for constraint in request.asked.constraints:
            constraint.advance(token_ids)
    except Exception as error:
        return _why(error)
    return None


def _why(error: Exception) -> str:
    if isinstance(error, ConstraintError):
        return str(error)
    logger.exception("a constraint failed", exc_info=error)
    return "a constraint failed"
