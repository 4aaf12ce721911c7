"""Which requests an engine can run at all. Imports no jax."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec

from jaxllm.cache.pool import PagePool
from jaxllm.config import Resolved
from jaxllm.messages import (
    GenerateRequest,
    PoolingRequest,
    RequestError,
    check_prompt_logprobs,
    check_salt,
)
from jaxllm.prepared import Additions, prepared
from jaxllm.sampling.options import SamplingParams
from jaxllm.tokenizer import Tokenizer


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
    prompt = request.prompt.tokens
    if not prompt:
        raise RequestError(
            "the prompt is empty; it must have at least one token", "prompt", "empty_prompt"
        )
    if len(prompt) > longest:
        generates = longest < resolved.max_model_len
        room = ""
        if generates:
            room = " and at least one must be generated"
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
        name = "best_of"
        if params.use_beam_search:
            name = "use_beam_search"
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
        self._resolved = resolved
        self._has_text = tokenizer is not None
        self.fits = fits

    def validate_request(self, request: GenerateRequest) -> GenerateRequest:
        """The request with the sampling that runs. Raises RequestError when it can never run
        here."""
        prompt = request.prompt.tokens
        check_prompt(request, self._resolved, self._resolved.max_model_len - 1)
        additions = Additions(is_compiled=request.grammar is not None)
        params = prepared(request.params, self._resolved, len(prompt), additions)
        if params is not request.params:
            request = replace(request, params=params)
        if params.stop_token_ids:
            check_ids("stop_token_ids", params.stop_token_ids, self._resolved.vocab_size)
        if params.prompt_logprobs is not None:
            check_prompt_logprobs([len(prompt)], params.prompt_logprobs, params.samples)
        check_ranking(params, self._resolved.logprobs_mode)
        if params.stop_strings and (not self._has_text or not params.detokenize):
            raise RequestError(
                "stop strings need a tokenizer and detokenize; use stop_token_ids", "stop"
            )
        # The last token's KV is never written
        tokens = len(prompt) + params.output_limit - 1
        if not self.fits(tokens):
            pool = self._resolved.num_pages * self._resolved.page_size
            raise RequestError(
                f"prompt and output of {tokens} tokens can never fit the KV pool of {pool} tokens; "
                "lower max_tokens or shorten the prompt",
                "max_tokens",
                "kv_pool_too_small",
            )
        return request


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


def pooling(request: GenerateRequest | PoolingRequest) -> PoolingRequest:
    """The request. Raises RequestError when it is none for a model that pools."""
    if isinstance(request, GenerateRequest):
        raise RequestError(
            "this model pools and generates nothing; ask for embeddings, classes or scores",
            None,
            "wrong_runner",
        )
    return request


def validate_pooling(
    request: PoolingRequest, resolved: Resolved, fits: Callable[[int], bool]
) -> None:
    """Raises RequestError unless a prompt can be pooled here; `fits` says whether the KV pages of
    so many tokens can ever be allocated."""
    check_prompt(request, resolved, resolved.max_model_len)
    length = len(request.prompt.tokens)
    if not fits(length):
        raise RequestError(
            f"a prompt of {length} tokens can never fit the KV pool; shorten it",
            "prompt",
            "kv_pool_too_small",
        )


def validate_search(
    request: GenerateRequest, resolved: Resolved, pools: Sequence[PagePool]
) -> None:
    """Raises RequestError for a beam search that needs more slots, pages or likely tokens of a step
    than the engine has."""
    params = request.params
    width = params.samples
    if not params.use_beam_search:
        return
    if resolved.prefix_refusal is not None:
        raise RequestError(
            f"this model runs no beam search: {resolved.prefix_refusal}, and beams continue from "
            "each other's; sample with a temperature, or leave use_beam_search out",
            "use_beam_search",
        )
    num_stops = len(params.stops(resolved.eos_ids))
    name = "n" if params.best_of is None else "best_of"
    if width > resolved.step_seqs:
        raise RequestError(
            f"a search with {width} beams needs as many slots, "
            f"but --max-num-seqs is {resolved.max_num_seqs}{_divided(resolved)}; "
            "ask for fewer beams or raise it",
            name,
        )
    if width + num_stops > resolved.max_logprobs:
        raise RequestError(
            f"a search with {width} beams and {num_stops} tokens that end it needs "
            f"the {width + num_stops} most likely tokens of a step, "
            f"but --max-logprobs is {resolved.max_logprobs}; ask for fewer beams or raise it",
            name,
        )
    prompt = len(request.prompt.tokens)
    tokens = prompt + params.output_limit - 1
    for pool, pages in zip(pools, max_pages(pools, prompt, tokens, width), strict=True):
        if pages <= pool.num_pages:
            continue
        raise RequestError(
            f"{width} beams of up to {tokens} tokens can need {pages} KV pages, "
            f"but the pool has {pool.num_pages}; ask for fewer beams or lower max_tokens",
            "max_tokens",
            "kv_pool_too_small",
        )


def _divided(resolved: Resolved) -> str:
    stages = resolved.pipeline_parallel_size
    if stages == 1:
        return ""
    return f" over {stages} stages"


def max_pages(pools: Sequence[PagePool], prompt: int, tokens: int, width: int) -> list[int]:
    """The most KV pages of each pool that `width` beams can hold.

    Beams share the full pages of the prompt. Where any pool frees pages behind a sliding window, a
    beam that was preempted may find no shared page; one more page each is the one being written.
    """
    if any(pool.out_of_window(tokens) for pool in pools):
        return [width * (pool.max_resident(tokens) + 1) for pool in pools]
    shared = prompt // pools[0].page_size
    return [shared + width * (pool.pages_for(tokens) - shared) for pool in pools]
