"""The options of logits: those of `process`, checked against model and engine, and functions that
run on the host. Imports no jax."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from jaxllm.engine.scheduling.request import HostFunction, LogitsOptions
from jaxllm.messages import RequestError
from jaxllm.sampling.bits import everything, packed, remove
from jaxllm.sampling.constraint import BadWords
from jaxllm.sampling.options import SamplingParams, is_set
from jaxllm.sampling.processor_arguments import Processor, length_of
from jaxllm.tokenizer import Tokenizer

logger = logging.getLogger("jaxllm")

SERVED = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logits_processors",
)

type _Reading = tuple[np.ndarray, list[tuple[int, ...]]]


class LogitsOptionsReader:
    """Reads options for a model with `vocab_size` logits and end-of-sequence tokens `eos_ids`, in
    an engine with these processors."""

    def __init__(
        self,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        processors: Sequence[Processor] = (),
        eos_ids: frozenset[int] = frozenset(),
    ):
        self._eos_ids = eos_ids
        self._vocab_size, self._tokenizer = vocab_size, tokenizer
        self._processors = {processor.name: processor for processor in processors}
        self._everything = everything(vocab_size)
        self._everything.flags.writeable = False
        # Of the last `validate_options`
        self._last: tuple[SamplingParams, _Reading | None] | None = None

    def validate_options(self, params: SamplingParams) -> None:
        """Raises RequestError when the options cannot be honoured."""
        self._last = params, self._reading(params)

    def read_options(self, params: SamplingParams) -> LogitsOptions | None:
        """The options of one choice, None where none is set; its constraints are its own.

        Params that were just validated are not read again. Raises RequestError as
        `validate_options`.
        """
        if self._last is None or self._last[0] is not params:
            self.validate_options(params)
        assert self._last is not None
        if self._last[1] is None:
            return None
        allowed_W, words = self._last[1]
        functions = [function for function in params.logits_processors or () if callable(function)]
        return LogitsOptions(allowed_W, (BadWords(words),) if words else (), functions)

    def _reading(self, params: SamplingParams) -> _Reading | None:
        """The bits of tokens that are always allowed, and the bad words of several tokens."""
        self._check_arguments(params)
        if not any(is_set(params, name) for name in SERVED):
            return None
        self._check_ids("logit_bias", params.logit_bias or ())
        allowed_W, words = self._everything, self._words(params)
        if params.allowed_token_ids is not None:
            self._check_ids("allowed_token_ids", params.allowed_token_ids)
            allowed_W = packed(params.allowed_token_ids, self._vocab_size)
        banned = {word[0] for word in words if len(word) == 1}
        if banned:
            allowed_W = allowed_W.copy()
            for token in banned:
                remove(allowed_W, token)
            if not allowed_W.any():
                raise RequestError(
                    "bad_words forbids every token of allowed_token_ids; allow another token",
                    "bad_words",
                )
        if params.min_tokens and params.allowed_token_ids is not None:
            never = {
                *banned,
                *(params.stop_token_ids or ()),
                *(() if params.ignore_eos else self._eos_ids),
            }
            if all(id in never for id in params.allowed_token_ids):
                raise RequestError(
                    "allowed_token_ids leaves only tokens that stop, which may not come before "
                    f"min_tokens ({params.min_tokens}); "
                    "allow another token, or set min_tokens to 0",
                    "allowed_token_ids",
                )
        return allowed_W, [word for word in words if len(word) > 1]

    def _words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """The token sequences of the bad words.

        A word counts as it starts a text and, where that takes as many tokens, after a space.
        Leading spaces are ignored unless it has nothing else. A sequence with a token beyond the
        model's logits is left out: the model cannot generate it.
        """
        if not params.bad_words:
            return []
        if self._tokenizer is None:
            raise RequestError(
                "bad_words needs a tokenizer; forbid tokens by logit_bias or allowed_token_ids",
                "bad_words",
            )
        words: list[tuple[int, ...]] = []
        for text in params.bad_words:
            word = text.lstrip(" ")
            plain, spaced = (
                tuple(self._tokenizer.encode(one, add_special_tokens=False))
                for one in (word or text, " " + word)
            )
            if not plain:
                raise RequestError(
                    f"bad_words holds {text[:40]!r}, which has no tokens; leave it out", "bad_words"
                )
            words.append(plain)
            if word and len(spaced) == len(plain) and spaced[0] != plain[0]:
                words.append(spaced)
        return [word for word in words if max(word) < self._vocab_size]

    def _check_arguments(self, params: SamplingParams) -> None:
        """`extra_args` must be arguments of the request's processors, as long as their defaults."""
        lengths: dict[str, set[int]] = {}
        for name in params.logits_processors or ():
            if not isinstance(name, str):
                continue
            if name not in self._processors:
                known = ", ".join(self._processors) or "none"
                raise RequestError(
                    f"logits_processors names {name[:40]!r}; this engine has {known}",
                    "logits_processors",
                )
            for argument, default in self._processors[name].defaults:
                lengths.setdefault(argument, set()).add(length_of(default))
        for argument, value in (params.extra_args or {}).items():
            if argument not in lengths:
                raise RequestError(
                    f"extra_args has {argument[:40]!r}, which no processor of this request takes",
                    "extra_args",
                )
            found = len(value) if isinstance(value, list) else 1
            if lengths[argument] != {found}:
                wanted = " and ".join(map(str, sorted(lengths[argument])))
                raise RequestError(
                    f"extra_args: {argument} must be {wanted} numbers, got {found}", "extra_args"
                )

    def _check_ids(self, param: str, ids: Iterable[int]) -> None:
        highest = max(ids, default=0)
        if highest >= self._vocab_size:
            raise RequestError(
                f"{param} holds token id {highest}; ids are 0 to {self._vocab_size - 1}",
                param,
                "invalid_token_id",
            )


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
