"""Logits processors on the host: functions of a request's output and its row of logits. Imports no
jax."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from jaxllm.engine.scheduling.request import HostFunction

logger = logging.getLogger("jaxllm")


class HostProcessorError(Exception):
    """A function did not return logits; the message names it and is for the client."""


def run_host_processors(
    functions: Sequence[HostFunction], output: list[int], logits_V: np.ndarray
) -> np.ndarray:
    """float32 logits `[V]` after all functions, in order. Logits of minus infinity stay so. Raises
    HostProcessorError."""
    impossible_V, no_nan = np.isneginf(logits_V), not np.isnan(logits_V).any()
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
