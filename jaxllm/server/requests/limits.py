"""Limits of the model and of the server that requests are checked against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxllm.config import Resolved
from jaxllm.messages import RequestError, check_prompt_logprobs
from jaxllm.prepared import count_logprobs
from jaxllm.sampling.options import SamplingParams
from jaxllm.sampling.values import OptionError
from jaxllm.server.errors import ContextOverflow, bad_request, describe
from jaxllm.server.requests.fields import whole
from jaxllm.server.requests.infill import Infill

# Characters of a text that may be longer than the context: a second or two of a tokenizer's time
TRUNCATED_CHARS = 1 << 22
MAX_MESSAGES = 4096  # of a conversation
MAX_PROMPTS = 1024  # texts or lists of token ids of one HTTP request
MAX_CHOICES = 1024  # prompts × n of one HTTP request
FEW_LOGPROBS = 20  # of a token; replies with as many are no longer than others can be
MAX_LOGPROBS = 1 << 22  # of the tokens that a request generates: some 300 MB of JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Facts that requests are checked against; made once when the engine is ready.

    Attributes:
        served: names that clients may use for the model.
        longest_token: characters of the vocabulary's longest token.
        may_drop: whether the tokenizer may leave out characters of a text.
        defaults: sampling options of generation_config.json.
        force_usage: whether every chunk of every stream carries usage.
        infill: marker tokens for prompts with a suffix, if the tokenizer has them.
    """

    resolved: Resolved
    served: tuple[str, ...]
    longest_token: int
    may_drop: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    force_usage: bool = False
    infill: Infill | None = None

    def char_limit(self, truncated: bool) -> int:
        """Characters that may be tokenised: any longer text exceeds the context, unless it is
        truncated, or the tokenizer may drop some of it."""
        fits = self.resolved.max_model_len * self.longest_token
        return max(fits, TRUNCATED_CHARS) if truncated or self.may_drop else fits

    def too_many_chars(
        self, length: int, param: str, truncated: bool = False, exact: bool = True
    ) -> ContextOverflow:
        """The refusal of a text with more characters than may be tokenised; without `exact` it has
        `length` at least."""
        counted = f"{length} characters"
        if not exact:
            counted = f"at least {counted}"
        remedy = "shorten it"
        if truncated:
            most = self.char_limit(True)
            remedy = f"at most {most} characters are tokenised to be truncated; {remedy}"
        return ContextOverflow(
            self.resolved.max_model_len,
            -(-length // self.longest_token),
            param,
            counted=counted,
            remedy=remedy,
        )


def check_chars(
    length: int, rules: Rules, param: str, truncated: bool = False, exact: bool = True
) -> None:
    """Refuse a text that is too long before it is tokenised; without `exact` it has `length`
    characters at least."""
    if length > rules.char_limit(truncated):
        raise rules.too_many_chars(length, param, truncated, exact)


def check_ids(ids: list[Any], resolved: Resolved, param: str, generates: bool = True) -> list[int]:
    """The token ids; refuse those that are no integers of the vocabulary, or too many, as in
    `check_length`."""
    check_length(len(ids), resolved, param, generates)
    return check_vocabulary(ids, resolved, param)


def check_vocabulary(ids: list[Any], resolved: Resolved, param: str) -> list[int]:
    """The token ids, of which there is one at least; refuse those that are no integers of the
    vocabulary."""
    ids = whole(ids)
    if not set(map(type, ids)) <= {int}:  # lists may be long, and true is no id
        wrong = next(id for id in ids if type(id) is not int)
        raise bad_request(
            f"{param} must hold token ids (integers), got {describe(wrong)}",
            param,
            "invalid_token_id",
        )
    for id in (min(ids), max(ids)):
        if not 0 <= id < resolved.vocab_size:
            raise bad_request(
                f"{param} holds token id {id}, which is outside the vocabulary "
                f"[0, {resolved.vocab_size}); send texts, or ids of this model's own tokenizer",
                param,
                "invalid_token_id",
            )
    return ids


def check_length(tokens: int, resolved: Resolved, param: str, generates: bool = True) -> None:
    """Refuse what is longer than the context, of which an answer that `generates` takes one
    token at least."""
    if tokens > resolved.max_model_len - generates:
        raise ContextOverflow(resolved.max_model_len, tokens, param, generates=generates)


def check_prompt_scoring(lengths: list[int], params: SamplingParams) -> None:
    """Refuse prompts with too many log-probabilities."""
    if params.prompt_logprobs is None:
        return
    try:
        check_prompt_logprobs(lengths, params.prompt_logprobs, params.samples)
    except RequestError as error:
        raise bad_request(str(error), error.param) from None


def check_logprobs(params: SamplingParams, resolved: Resolved, names: dict[str, str]) -> None:
    """Refuse more log-probabilities than the server or a reply has; `names` as for
    `sampling.read_sampling`."""
    try:
        top = count_logprobs(params, "logprobs", resolved) or 0
        count_logprobs(params, "prompt_logprobs", resolved)
    except RequestError as error:
        option = error.param or ""
        name = names.get(option, option)
        raise bad_request(name + str(error).removeprefix(option), name) from None
    limit = resolved.max_model_len
    tokens = limit if params.max_tokens is None else min(params.max_tokens, limit)
    entries = tokens * (top + 1) * params.samples
    if top > FEW_LOGPROBS and entries > MAX_LOGPROBS:
        name = names.get("logprobs", "logprobs")
        raise bad_request(
            f"{name} ({top}) for up to {tokens} tokens of {params.samples} choices are {entries} "
            f"log-probabilities; at most {MAX_LOGPROBS} are given; ask for fewer, or send a "
            "smaller max_tokens",
            name,
        )


def check_sampling(params: SamplingParams, stream: bool, resolved: Resolved) -> None:
    """Limits that depend on the reply, the model and the server."""
    if stream and params.samples > params.n and not params.use_beam_search:
        raise bad_request(  # the best choices are known only when all have ended
            f"best_of ({params.samples}) above n ({params.n}) cannot be streamed; "
            "leave out stream or best_of",
            "best_of",
        )
    if stream and params.prompt_logprobs is not None:
        raise bad_request(
            "prompt_logprobs is not available with stream: true; "
            "completions stream a prompt's log-probabilities with echo and logprobs",
            "prompt_logprobs",
        )
    try:
        params.truncated([], resolved.max_model_len)
    except OptionError as error:
        raise bad_request(str(error), error.param) from None
    if params.priority and resolved.scheduling_policy != "priority":
        raise bad_request(
            "priority needs a server with --scheduling-policy priority; leave it out", "priority"
        )
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        highest = max(getattr(params, name) or (), default=0)
        if highest >= resolved.vocab_size:
            raise bad_request(
                f"{name} holds {highest}, which is outside the vocabulary "
                f"[0, {resolved.vocab_size})",
                name,
                "invalid_token_id",
            )


def check_choices(prompts: Sequence[str | list[int]], params: SamplingParams) -> None:
    """Refuse a request for too many choices."""
    if len(prompts) * params.samples > MAX_CHOICES:
        name = "n" if params.best_of is None else "best_of"
        raise bad_request(
            f"{len(prompts)} prompts × {name} = {params.samples} is more than {MAX_CHOICES} "
            "choices; send fewer per request",
            name,
        )


def check_suffix(
    suffix: str,
    prompts: Sequence[str | list[int]],
    params: SamplingParams,
    echo: bool,
    rules: Rules,
) -> None:
    """Refuse a suffix where none can be used."""
    if rules.infill is None:
        raise bad_request(
            "suffix needs fill-in-the-middle tokens (as of Qwen2.5-Coder, StarCoder, "
            "DeepSeek-Coder, CodeLlama), and this model's tokenizer has none; leave it out",
            "suffix",
            "unsupported_parameter",
        )
    truncated = params.truncate_prompt_tokens is not None
    for name, is_sent in (("echo", echo), ("truncate_prompt_tokens", truncated)):
        if is_sent:
            raise bad_request(f"suffix cannot be combined with {name}; leave one of them out", name)
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise bad_request("a suffix needs prompts that are texts, not token ids", "suffix")
    check_chars(max(map(len, prompts)) + len(suffix), rules, "suffix")


def check_min_tokens(params: SamplingParams, prompt_tokens: int, resolved: Resolved) -> None:
    """Refuse to generate more tokens at least than the context has after the prompt."""
    rest = resolved.max_model_len - prompt_tokens
    if params.min_tokens > rest:
        raise bad_request(
            f"min_tokens ({params.min_tokens}) must be at most max_tokens ({rest})", "min_tokens"
        )
