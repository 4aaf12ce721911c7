"""The options of a request that change its logits. Imports no jax."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from jaxllm.config import Resolved
from jaxllm.engine.constraints.thinking_limit import ThinkingLimit
from jaxllm.engine.intake.validation import check_ids
from jaxllm.engine.scheduling.request import LogitsOptions
from jaxllm.messages import RequestError, ThinkingBudget
from jaxllm.sampling.bits import everything, packed, remove
from jaxllm.sampling.constraint import BadWords, Constraint
from jaxllm.sampling.options import PROCESS_COLUMNS, SamplingParams, is_set
from jaxllm.sampling.processor_arguments import Processor, length_of
from jaxllm.tokenizer import Tokenizer

SERVED = (
    *PROCESS_COLUMNS,
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logits_processors",
)

type _Reading = tuple[np.ndarray, list[tuple[int, ...]]]


class LogitsOptionsReader:
    """Reads options for an engine's model, in an engine with these processors."""

    def __init__(
        self,
        resolved: Resolved,
        tokenizer: Tokenizer | None,
        processors: Sequence[Processor] = (),
    ):
        self._resolved = resolved
        self._vocab_size = resolved.vocab_size
        self._tokenizer = tokenizer
        self._processors = {processor.name: processor for processor in processors}
        self._everything = everything(resolved.vocab_size)
        self._everything.flags.writeable = False
        # Of the last `validate_options`
        self._last: tuple[SamplingParams, _Reading | None] | None = None

    def validate_options(
        self, params: SamplingParams, thinking: ThinkingBudget | None = None
    ) -> None:
        """Raises RequestError when the options cannot be honoured."""
        self._last = params, self._reading(params)
        if thinking is None:
            return
        if params.use_beam_search:
            raise RequestError(
                "thinking_token_budget cannot be used in a beam search; leave it out",
                "thinking_token_budget",
            )
        self._end_ids(thinking)

    def read_options(
        self, params: SamplingParams, thinking: ThinkingBudget | None = None
    ) -> LogitsOptions | None:
        """The options of one choice, None where none is set; its constraints are its own.

        Params that were just validated are not read again. Raises RequestError as
        `validate_options`.
        """
        if self._last is None or self._last[0] is not params:
            self.validate_options(params)
        assert self._last is not None
        if self._last[1] is None and thinking is None:
            return None
        allowed_W, words = self._last[1] or (self._everything, [])
        functions = [function for function in params.logits_processors or () if callable(function)]
        constraints: list[Constraint] = [BadWords(words)] if words else []
        if thinking is not None:
            constraints.append(self._thinking_limit(thinking))
        return LogitsOptions(allowed_W, constraints, functions)

    def _thinking_limit(self, thinking: ThinkingBudget) -> ThinkingLimit:
        assert self._tokenizer is not None, "refused by validate_options"
        return ThinkingLimit(
            thinking.tokens,
            thinking.begun,
            thinking.starts,
            thinking.ends,
            self._end_ids(thinking),
            functools.partial(self._tokenizer.decode, skip_special_tokens=False),
        )

    def _end_ids(self, thinking: ThinkingBudget) -> list[int]:
        """The tokens of the marker that ends reasoning. Raises RequestError."""
        if self._tokenizer is not None:
            ids = self._tokenizer.encode(thinking.ends[0], add_special_tokens=False)
        else:
            ids = []
        if not ids or max(ids) >= self._vocab_size:
            raise RequestError(
                f"the model has no tokens for {thinking.ends[0][:40]!r}, which ends its reasoning",
                "thinking_token_budget",
            )
        return ids

    def _reading(self, params: SamplingParams) -> _Reading | None:
        """The bits of tokens that are always allowed, and the bad words of several tokens."""
        self._check_arguments(params)
        if not any(is_set(params, name) for name in SERVED):
            return None
        check_ids("logit_bias", [*(params.logit_bias or ())], self._vocab_size)
        allowed_W = self._everything
        words = self._words(params)
        if params.allowed_token_ids is not None:
            check_ids("allowed_token_ids", params.allowed_token_ids, self._vocab_size)
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
            never = banned | params.stops(self._resolved.eos_ids)
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
            found = 1
            if isinstance(value, list):
                found = len(value)
            if lengths[argument] != {found}:
                wanted = " and ".join(map(str, sorted(lengths[argument])))
                raise RequestError(
                    f"extra_args: {argument} must be {wanted} numbers, got {found}", "extra_args"
                )
