"""The masks of a step's constrained requests, filled by their constraints in threads while the device computes. Imports no jax."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxllm.engine.request import Request
from jaxllm.sampling.constraint import ConstraintError

MOST_THREADS = 8

logger = logging.getLogger("jaxllm")


class Masks:
    """Asks constraints. Whatever they raise comes back as the text that ends their request; it never reaches another one."""

    def __init__(self) -> None:
        self._threads = min(MOST_THREADS, os.cpu_count() or 1)
        self._pool: ThreadPoolExecutor | None = None

    def fill(self, requests: Sequence[Request]) -> list[np.ndarray | str]:
        """Of each request the packed bits of what it may say next, or why it cannot go on."""
        if len(requests) < 2 or self._threads < 2:
            return [_mask(request) for request in requests]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="masks")
        shares = [requests[i :: self._threads] for i in range(self._threads)]
        found: list[np.ndarray | str] = [""] * len(requests)
        for i, share in enumerate(self._pool.map(lambda share: [_mask(request) for request in share], shares)):
            found[i :: self._threads] = share
        return found


def advance(request: Request, token_ids: Sequence[int]) -> str | None:
    """Tell a request's constraints what it has said; the text that ends the request when one fails."""
    assert request.asked is not None
    try:
        for constraint in request.asked.constraints:
            constraint.advance(token_ids)
    except Exception as error:
        return _why(error)
    return None


def _mask(request: Request) -> np.ndarray | str:
    assert request.asked is not None
    allowed_W = request.asked.allowed_W.copy()
    try:
        for constraint in request.asked.constraints:
            constraint.mask(allowed_W)
    except Exception as error:
        return _why(error)
    return allowed_W if allowed_W.any() else "the request's constraints allow no token here"


def _why(error: Exception) -> str:
    if isinstance(error, ConstraintError):
        return str(error)
    logger.exception("a constraint failed", exc_info=error)
    return "a constraint failed"
