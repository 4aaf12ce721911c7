"""Which requests an engine can run at all, and the options of their logits. Imports no jax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import numpy as np

from jaxllm.config import Resolved
from jaxllm.engine.constraints.thinking_limit import ThinkingLimit
from jaxllm.engine.scheduling.request import LogitsOptions
from jaxllm.messages import (
    GenerateRequest,
    PoolingRequest,
    RequestError,
    ThinkingBudget,
    check_prompt_logprobs,
    check_salt,
    count_logprobs,
)
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


def check_ids(param: str, ids: list[int], vocab_size: int) -> None:
    """Raises RequestError unless all `ids` of the field `param` are tokens of the model."""
    try:
        # A prompt can be long: this checks value and type of a token in 15 ns
        msgspec.convert(ids, _token_ids(vocab_size))
    except msgspec.ValidationError:
        if not {int}.issuperset(map(type, ids)):
            wrong = "must hold integers only"
        else:
            bad = min(ids) if min(ids) < 0 else max(ids)
            wrong = f"holds token id {bad}; ids are 0 to {vocab_size - 1}"
        raise RequestError(f"{param} {wrong}", param, "invalid_token_id") from None


@functools.cache
def _token_ids(vocab_size: int) -> Any:
    """The type of a list of token ids."""
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]


def check_prompt(
    request: GenerateRequest | PoolingRequest, resolved: Resolved, longest: int
) -> None:
    """Raises RequestError unless the prompt has 1 to `longest` tokens of the model, and the engine
    honours cache_salt and priority."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError(
            "the prompt is empty; it must have at least one token", "prompt", "empty_prompt"
        )
    if len(prompt) > longest:
        generates = longest < resolved.max_model_len
        room = " and at least one must be generated" if generates else ""
        raise RequestError(
            f"this model's maximum context length is {resolved.max_model_len} tokens, "
            f"but the prompt has {len(prompt)} tokens{room}; "
            "the prompt is too long: shorten it",
            "prompt",
            "context_length_exceeded",
        )
    check_ids("prompt", prompt, resolved.vocab_size)
    if request.cache_salt is not None:
        check_salt(request.cache_salt)
    if request.params.priority and resolved.scheduling_policy != "priority":
        raise RequestError(
            "priority needs an engine with --scheduling-policy priority; leave it out", "priority"
        )


def check_ranking(params: SamplingParams, logprobs_mode: str) -> None:
    """Raises RequestError when choices are ranked, but the engine gives no log-probabilities."""
    if logprobs_mode.endswith("logits") and params.ranked:
        name = "use_beam_search" if params.use_beam_search else "best_of"
        raise RequestError(
            f"{name} compares log-probabilities, which an engine with "
            f"--logprobs-mode {logprobs_mode} does not give; leave it out",
            name,
        )


class RequestValidator:
    """Checks requests against the resolved configuration.

    Attributes:
        fits: whether the KV pages of a request can ever be allocated, from its tokens.
    """

    def __init__(
        self, resolved: Resolved, tokenizer: Tokenizer | None, fits: Callable[[int], bool]
    ):
        self._resolved, self._has_text, self.fits = resolved, tokenizer is not None, fits

    def validate_request(self, request: GenerateRequest) -> GenerateRequest:
        """The request, with a number of log-probabilities in place of -1. Raises RequestError when
        it can never run here."""
        request = _with_counts(request, self._resolved)
        prompt, limit = request.prompt_token_ids, self._resolved.max_model_len
        check_prompt(request, self._resolved, limit - 1)
        if request.params.stop_token_ids:
            check_ids("stop_token_ids", request.params.stop_token_ids, self._resolved.vocab_size)
        if request.params.prompt_logprobs is not None:
            check_prompt_logprobs(
                [len(prompt)], request.params.prompt_logprobs, request.params.samples
            )
        check_ranking(request.params, self._resolved.logprobs_mode)
        if request.params.stop_strings and (not self._has_text or not request.params.detokenize):
            raise RequestError(
                "stop strings need a tokenizer and detokenize; use stop_token_ids", "stop"
            )
        # The last token's KV is never written
        tokens = min(limit, len(prompt) + (request.params.max_tokens or limit)) - 1
        if not self.fits(tokens):
            pool = self._resolved.num_pages * self._resolved.page_size
            raise RequestError(
                f"prompt and output of {tokens} tokens can never fit the KV pool of {pool} tokens; "
                "lower max_tokens or shorten the prompt",
                "max_tokens",
                "kv_pool_too_small",
            )
        return request


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
        ids = (
            []
            if self._tokenizer is None
            else self._tokenizer.encode(thinking.ends[0], add_special_tokens=False)
        )
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
        allowed_W, words = self._everything, self._words(params)
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


def _with_counts(request: GenerateRequest, resolved: Resolved) -> GenerateRequest:
    """The request with a number of log-probabilities in place of -1. Raises RequestError where
    there are too many."""
    params = count_logprobs(request.params, resolved.max_logprobs, resolved.vocab_size)
    return request if params is request.params else replace(request, params=params)


def generating(request: GenerateRequest | PoolingRequest) -> GenerateRequest:
    """The request. Raises RequestError when it is none for a model that generates."""
    if isinstance(request, PoolingRequest):
        raise RequestError(
            "this model generates and pools nothing; ask for completions, or start it with "
            "--runner pooling",
            None,
            "wrong_runner",
        )
    return request
