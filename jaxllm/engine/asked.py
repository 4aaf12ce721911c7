"""What requests ask of `process`, checked against the model. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterable

from jaxllm.engine.request import Asked, RequestError
from jaxllm.sampling.bits import everything, packed, remove
from jaxllm.sampling.constraint import BadWords
from jaxllm.sampling.options import OPTIONS, SamplingParams
from jaxllm.tokenizer import Tokenizer

SERVED = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words")


class Asking:
    """Reads requests for a model with `vocab_size` logits."""

    def __init__(self, vocab_size: int, tokenizer: Tokenizer | None):
        self._vocab_size, self._tokenizer = vocab_size, tokenizer
        self._everything = everything(vocab_size)
        self._everything.flags.writeable = False

    def of(self, params: SamplingParams) -> Asked | None:
        """What one choice asks for, None when it is nothing. Raises RequestError when it cannot be."""
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
                raise RequestError("bad_words forbids every token of allowed_token_ids", "bad_words")
        longer = [word for word in words if len(word) > 1]
        return Asked(allowed_W, (BadWords(longer),) if longer else ())

    def _words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """The tokens of each bad word at the beginning of a text, and in the middle of one where these are as many."""
        if not params.bad_words:
            return []
        if self._tokenizer is None:
            raise RequestError("bad_words needs a tokenizer; forbid tokens by logit_bias or allowed_token_ids", "bad_words")
        words: list[tuple[int, ...]] = []
        for text in params.bad_words:
            plain, spaced = (tuple(self._tokenizer.encode(space + text.lstrip(), add_special_tokens=False)) for space in ("", " "))
            if not plain:
                raise RequestError(f"bad_words holds {text[:40]!r}, which has no tokens", "bad_words")
            words.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                words.append(spaced)
        return words

    def _check_ids(self, param: str, ids: Iterable[int]) -> None:
        highest = max(ids, default=0)
        if highest >= self._vocab_size:
            message = f"{param} holds token id {highest}; ids are 0 to {self._vocab_size - 1}"
            raise RequestError(message, param, "invalid_token_id")


def asks(params: SamplingParams, name: str) -> bool:
    """Whether an option has a value that asks for something."""
    return getattr(params, name) not in OPTIONS[name].neutral
