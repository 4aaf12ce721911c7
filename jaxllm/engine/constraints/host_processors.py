"""Logits processors that are called on the host: functions of one request's output and its row of
logits. Imports no jax."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from jaxllm.engine.scheduling.request import HostFunction

logger = logging.getLogger("jaxllm")


class RewriteError(Exception):
    """A function did not give logits; the message names it and is for who asked for it."""


def rewritten(
    functions: Sequence[HostFunction], output: list[int], logits_V: np.ndarray
) -> np.ndarray:
    """float32 logits as functions make them, one after another. What is impossible before them
    stays so. Raises RewriteError."""
    impossible_V, whole = np.isneginf(logits_V), not np.isnan(logits_V).any()
    for function in functions:
        name = f"the logits processor {getattr(function, '__name__', type(function).__name__)}"
        try:
            given = function(output, logits_V.copy())
            found_V = None if given is None else np.asarray(given, np.float32)
        except Exception as error:
            logger.exception("%s failed", name)
            raise RewriteError(f"{name} raised {type(error).__name__}: {error}") from error
        if found_V is None:
            raise RewriteError(
                f"{name} returned nothing; it must return the {logits_V.size} logits"
            )
        if found_V.shape != logits_V.shape:
            raise RewriteError(
                f"{name} returned an array of shape {found_V.shape}; it must return the {logits_V.size} logits"
            )
        if whole and np.isnan(found_V).any():
            raise RewriteError(f"{name} returned logits that are not numbers (NaN)")
        logits_V = found_V
    return np.where(impossible_V, np.float32(-np.inf), logits_V)
