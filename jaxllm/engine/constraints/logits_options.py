"""What requests ask of `process`, checked against the model and the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxllm.engine.scheduling.request import LogitsOptions
from jaxllm.messages import RequestError
from jaxllm.sampling.bits import everything, packed, remove
from jaxllm.sampling.constraint import BadWords
from jaxllm.sampling.options import OPTIONS, SamplingParams
from jaxllm.sampling.processors import Processor
from jaxllm.tokenizer import Tokenizer

SERVED = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logits_processors",
)


class LogitsOptionsReader:
    """Reads requests for a model with `vocab_size` logits, which `eos_ids` end, and an engine with
    these processors."""

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
        # By the last `check`
        self._read: (
            tuple[SamplingParams, tuple[np.ndarray, list[tuple[int, ...]]] | None] | None
        ) = None

    def check(self, params: SamplingParams) -> None:
        """Raises RequestError when what a request asks for cannot be."""
        self._read = params, self._reading(params)

    def of(self, params: SamplingParams) -> LogitsOptions | None:
        """What one choice asks for, None when it is nothing; its constraints are its own. Params
        that were just checked are not read again. Raises RequestError as `check`."""
        if self._read is None or self._read[0] is not params:
            self.check(params)
        assert self._read is not None
        if self._read[1] is None:
            return None
        allowed_W, words = self._read[1]
        functions = [function for function in params.logits_processors or () if callable(function)]
        return LogitsOptions(allowed_W, (BadWords(words),) if words else (), functions)

    def _reading(self, params: SamplingParams) -> tuple[np.ndarray, list[tuple[int, ...]]] | None:
        """The tokens that are always allowed, and the bad words of several tokens."""
        self._check_arguments(params)
        if not any(asks(params, name) for name in SERVED):
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
                    "bad_words forbids every token of allowed_token_ids", "bad_words"
                )
        if params.min_tokens and params.allowed_token_ids is not None:
            never = {
                *banned,
                *(params.stop_token_ids or ()),
                *(() if params.ignore_eos else self._eos_ids),
            }
            if all(id in never for id in params.allowed_token_ids):
                message = f"allowed_token_ids leaves only tokens that stop, which may not come before min_tokens ({params.min_tokens})"
                raise RequestError(
                    f"{message}; allow another token, or set min_tokens to 0", "allowed_token_ids"
                )
        return allowed_W, [word for word in words if len(word) > 1]

    def _words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """The tokens of each bad word at the beginning of a text, and after a space where these are
        as many. Spaces that it begins with do not count, unless it has nothing else."""
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
                    f"bad_words holds {text[:40]!r}, which has no tokens", "bad_words"
                )
            words.append(plain)
            if word and len(spaced) == len(plain) and spaced[0] != plain[0]:
                words.append(spaced)
        return words

    def _check_arguments(self, params: SamplingParams) -> None:
        """`extra_args` must be arguments of the processors that the request enables, each as many
        numbers as its default."""
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
                lengths.setdefault(argument, set()).add(
                    len(default) if isinstance(default, tuple) else 1
                )
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
            message = f"{param} holds token id {highest}; ids are 0 to {self._vocab_size - 1}"
            raise RequestError(message, param, "invalid_token_id")


def asks(params: SamplingParams, name: str) -> bool:
    """Whether an option has a value that asks for something."""
    return getattr(params, name) not in OPTIONS[name].neutral
