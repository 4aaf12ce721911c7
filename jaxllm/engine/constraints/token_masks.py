"""What the host does to a step's logits: token bitmasks, made while the device computes, and host
processors. Imports no jax."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.scheduling.request import HostFunction, Request
from jaxllm.sampling.bits import nothing_but
from jaxllm.sampling.constraint import Constraint, ConstraintError

logger = logging.getLogger("jaxllm")

NONE_ALLOWED = "the request's constraints allow no token here"
NO_TOKEN = (
    "no token can be drawn: the model's logits are not finite, "
    "or the request's options leave no token"
)
HELD_BACK = (
    "no token can be drawn: those that may come next stop the request, which min_tokens forbids"
)


def token_bitmask(
    grammars: Grammars, requests: Sequence[Request], allowed_RW: np.ndarray
) -> list[tuple[int, str]]:
    """Write the packed bits of the tokens that each request may generate next.

    Returns (row, reason) of rows without an allowed token. Whatever a constraint raises ends its
    own request alone.
    """
    if grammars.copy_masks(requests, allowed_RW):
        return []
    found = [
        (row, _write_mask(grammars, request, allowed_RW[row]))
        for row, request in enumerate(requests)
    ]
    return [(row, reason) for row, reason in found if reason is not None]


def accept_token(constraints: Sequence[Constraint], token: int) -> str | None:
    """Let a request's constraints follow a new token. Returns the reason that ends the request
    when one of them has failed."""
    try:
        for constraint in constraints:
            constraint.accept_tokens((token,))
    except Exception as error:
        return _reason(error)
    return None


def _write_mask(grammars: Grammars, request: Request, allowed_W: np.ndarray) -> str | None:
    assert request.logits_options is not None
    allowed_W[:] = request.logits_options.allowed_W
    try:
        for constraint in request.logits_options.constraints:
            constraint.apply_mask(allowed_W)
        if request.logits_options.has_grammar:
            grammars.apply_mask(request, allowed_W)  # last: it depends on what the others allow
    except Exception as error:
        return _reason(error)
    if not allowed_W.any():
        return NONE_ALLOWED
    held_back = len(request.output) < request.params.min_tokens and nothing_but(
        allowed_W, request.stops
    )
    return HELD_BACK if held_back else None


def _reason(error: Exception) -> str:
    if isinstance(error, ConstraintError):
        return str(error)
    logger.exception("a constraint failed", exc_info=error)
    return "a constraint failed"


class HostProcessorError(Exception):
    """A function did not return logits; the message names it and is for the client."""


def run_host_processors(
    functions: Sequence[HostFunction], output: list[int], logits_V: np.ndarray
) -> np.ndarray:
    """float32 logits `[V]` after all functions, in order. Logits of minus infinity stay so. Raises
    HostProcessorError."""
    impossible_V = np.isneginf(logits_V)
    no_nan = not np.isnan(logits_V).any()
    for function in functions:
        name = f"the logits processor {getattr(function, '__name__', type(function).__name__)}"
        try:
            given = function(output, logits_V.copy())
            found_V = None if given is None else np.asarray(given, np.float32)
        except Exception as error:
            logger.exception("%s failed", name)
            raise HostProcessorError(f"{name} raised {type(error).__name__}: {error}") from error
        if found_V is None:
            raise HostProcessorError(
                f"{name} returned nothing; it must return the {logits_V.size} logits"
            )
        if found_V.shape != logits_V.shape:
            raise HostProcessorError(
                f"{name} returned an array of shape {found_V.shape}; "
                f"it must return the {logits_V.size} logits"
            )
        if no_nan and np.isnan(found_V).any():
            raise HostProcessorError(f"{name} returned logits that are not numbers (NaN)")
        logits_V = found_V
    return np.where(impossible_V, np.float32(-np.inf), logits_V)
