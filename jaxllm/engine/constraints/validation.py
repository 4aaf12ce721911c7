"""Which requests an engine can run at all. Imports no jax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from jaxllm.config import Resolved
from jaxllm.messages import (
    GenerateRequest,
    RequestError,
    check_logprobs,
    check_prompt_logprobs,
    check_salt,
)
from jaxllm.sampling.options import SamplingParams


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
        fits: whether the KV pages of a request of so many tokens can ever be allocated.
    """

    def __init__(self, resolved: Resolved, has_text: bool, fits: Callable[[int], bool]):
        self._resolved, self._has_text, self.fits = resolved, has_text, fits
        self._tokens = list[Annotated[int, msgspec.Meta(ge=0, lt=resolved.vocab_size)]]

    def validate_request(self, request: GenerateRequest) -> None:
        """Raises RequestError when the request can never run here."""
        prompt, limit = request.prompt_token_ids, self._resolved.max_model_len
        if not prompt:
            raise RequestError(
                "the prompt is empty; it must have at least one token", "prompt", "empty_prompt"
            )
        if len(prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but the limit is {limit} tokens "
                "with at least one to generate; shorten the prompt",
                "prompt",
                "context_length_exceeded",
            )
        self._check_ids("prompt", prompt)
        if request.cache_salt is not None:
            check_salt(request.cache_salt)
        if request.params.priority and self._resolved.scheduling_policy != "priority":
            raise RequestError(
                "priority needs an engine with --scheduling-policy priority; leave it out",
                "priority",
            )
        self._check_ids("stop_token_ids", request.params.stop_token_ids or [])
        for name in ("logprobs", "prompt_logprobs"):
            check_logprobs(name, getattr(request.params, name), self._resolved.max_logprobs)
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

    def _check_ids(self, param: str, ids: list[int]) -> None:
        try:
            # A prompt can be long: this checks value and type of a token in 15 ns
            msgspec.convert(ids, self._tokens)
        except msgspec.ValidationError:
            if not {int}.issuperset(map(type, ids)):
                wrong = "must hold integers only"
            else:
                bad = min(ids) if min(ids) < 0 else max(ids)
                highest = self._resolved.vocab_size - 1
                wrong = f"holds token id {bad}; ids are 0 to {highest}"
            raise RequestError(f"{param} {wrong}", param, "invalid_token_id") from None
