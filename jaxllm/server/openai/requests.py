"""OpenAI request bodies → typed requests: everything that can be checked before a token is made is
checked here."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxllm.config import Resolved
from jaxllm.messages import RequestError, check_prompt_logprobs
from jaxllm.sampling.options import SamplingParams
from jaxllm.sampling.values import OptionError
from jaxllm.server.errors import ApiError, bad_request, shown
from jaxllm.server.openai.chat import (
    CHAT_NEUTRAL,
    CHATS_ALONE,
    read_messages,
    read_template_kwargs,
    refuse_tools,
)
from jaxllm.server.openai.fields import (
    IGNORED,
    NEUTRAL,
    STRUCTURE_FIELDS,
    WIRE_OPTIONS,
    Structure,
    get,
    is_one_of,
    option_error,
    optional,
    read_salt,
    read_sampling,
    read_stream,
    read_structure,
    refuse_unsupported,
)

MAX_PROMPTS = 1024
MAX_CHOICES = 1024  # prompts × n of one HTTP request

type Prompt = str | list[int]

_SHARED = frozenset(
    {
        *WIRE_OPTIONS,
        *NEUTRAL,
        *IGNORED,
        *STRUCTURE_FIELDS,
        "model",
        "stream",
        "stream_options",
        "add_special_tokens",
        "cache_salt",
    }
    | {"return_tokens_as_token_ids", "echo"}
)
# Fields of chats
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {"top_logprobs": (0,), "max_completion_tokens": ()}
COMPLETIONS_ALONE: dict[str, tuple[Any, ...]] = {"prompt": ("", [])}
COMPLETION_FIELDS = _SHARED | {*COMPLETIONS_ALONE, *COMPLETION_NEUTRAL, *CHATS_ALONE}
CHAT_FIELDS = COMPLETION_FIELDS | CHAT_NEUTRAL.keys()
TOKENIZE_FIELDS = frozenset(
    {
        "model",
        "prompt",
        "messages",
        "add_special_tokens",
        "return_token_strs",
        "add_generation_prompt",
        "continue_final_message",
    }
    | {
        "chat_template",
        "chat_template_kwargs",
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        *CHAT_NEUTRAL,
    }
)

# Of a text of which the last tokens are wanted: a second or two of a tokenizer's time
TRUNCATED_CHARS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What requests are checked against; made once when the engine is ready."""

    resolved: Resolved
    served: tuple[str, ...]
    longest_token: int  # characters
    # Sampling options of generation_config.json
    defaults: dict[str, Any] = field(default_factory=dict)
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def max_chars(self) -> int:
        """A longer text cannot fit the context, whatever it is."""
        return self.resolved.max_model_len * self.longest_token

    def most_chars(self, truncated: bool) -> int:
        """Characters that are worth tokenising; more where all but the last tokens are left out."""
        return max(self.max_chars, TRUNCATED_CHARS) if truncated else self.max_chars


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What both generating endpoints share. `params` is not yet clamped to the context; its
    `prompt_logprobs` may be there for an echo, while those here are what the client wants to see.
    """

    model: str
    params: SamplingParams
    structure: Structure | None
    stream: bool
    usage_at_end: bool
    usage_always: bool
    echo: bool  # what the generation goes on from is part of the text
    prompt_logprobs: int | None
    nameless: bool  # tokens are to be named by their ids
    cache_salt: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompts: list[Prompt]
    add_special_tokens: bool
    generates: bool  # false: only the prompt is wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages in the form that chat templates take."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    conversation: Conversation


def parse_completion(body: dict[str, Any], rules: Rules) -> CompletionRequest:
    """Raises ApiError that names the field at fault."""
    model = read_model(body, rules.served)
    refuse_unsupported(body, NEUTRAL | COMPLETION_NEUTRAL)
    refuse_unsupported(body, CHATS_ALONE, "/v1/chat/completions")
    structure = read_structure(body)
    stream, at_end, always = read_stream(body)
    echo = get(body, "echo", bool, False)
    scoring = echo and is_one_of(body.get("max_tokens"), (0,))
    params = read_sampling(body, rules.defaults, **({"max_tokens": 1} if scoring else {}))
    check_sampling(params, rules.resolved, "logprobs")
    check_best_of(params, stream)
    wanted = read_prompt_logprobs(params, stream)
    if echo and params.logprobs is not None:
        if params.use_beam_search:
            raise bad_request(
                "echo with logprobs cannot be combined with use_beam_search; leave one of them out",
                "echo",
            )
        params = dataclasses.replace(params, prompt_logprobs=max(params.logprobs, wanted or 0))
    prompts = read_prompts(body.get("prompt"), rules, params)
    if len(prompts) * params.samples > MAX_CHOICES:
        name = "n" if params.best_of is None else "best_of"
        raise bad_request(
            f"{len(prompts)} prompts × {name} = {params.samples} is more than {MAX_CHOICES} choices; send fewer per request",
            name,
        )
    return CompletionRequest(
        model=model,
        params=params,
        structure=structure,
        stream=stream,
        usage_at_end=at_end,
        usage_always=always,
        cache_salt=read_salt(body),
        echo=echo,
        prompt_logprobs=wanted,
        nameless=get(body, "return_tokens_as_token_ids", bool, False),
        prompts=prompts,
        add_special_tokens=get(body, "add_special_tokens", bool, True),
        generates=not scoring,
    )


def parse_chat(body: dict[str, Any], rules: Rules) -> ChatRequest:
    """Raises ApiError that names the field at fault."""
    model = read_model(body, rules.served)
    refuse_unsupported(body, NEUTRAL | CHAT_NEUTRAL)
    refuse_unsupported(body, COMPLETIONS_ALONE, "/v1/completions")
    structure = read_structure(body)
    refuse_tools(body)
    stream, at_end, always = read_stream(body)
    conversation = read_conversation(body, rules)
    completion = body.get("max_completion_tokens")
    limit = completion if completion is not None else body.get("max_tokens")
    if completion is not None:
        # Which does not count then, but is no place for anything else
        get(body, "max_tokens", int, 0)
    logprobs = read_chat_logprobs(body)
    try:
        params = read_sampling(body, rules.defaults, logprobs=logprobs, max_tokens=limit)
    except ApiError as error:
        if error.param == "max_tokens" and completion is not None:
            raise bad_request(
                error.message.replace("max_tokens", "max_completion_tokens"),
                "max_completion_tokens",
            ) from None
        raise
    check_sampling(params, rules.resolved, "top_logprobs")
    check_best_of(params, stream)
    return ChatRequest(
        model=model,
        params=params,
        structure=structure,
        stream=stream,
        usage_at_end=at_end,
        usage_always=always,
        cache_salt=read_salt(body),
        echo=get(body, "echo", bool, False),
        prompt_logprobs=read_prompt_logprobs(params, stream),
        nameless=get(body, "return_tokens_as_token_ids", bool, False),
        conversation=conversation,
    )


def read_model(body: dict[str, Any], served: Sequence[str], required: bool = True) -> str:
    """The served name that the request asks for; a server of one name needs none.

    Raises ApiError: 400 when it is missing and several are served, 404 when it is unknown.
    """
    name = optional(body, "model", str)
    if name is None:
        if required and len(served) > 1:
            raise bad_request(f"model is required; this server serves {', '.join(served)}", "model")
        return served[0]
    if name not in served:
        message = f"the model {shown(name)} does not exist; this server serves {', '.join(served)}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return name


def read_conversation(body: dict[str, Any], rules: Rules) -> Conversation:
    """Messages and how to render them."""
    messages = read_messages(
        body.get("messages"), rules.most_chars(body.get("truncate_prompt_tokens") is not None)
    )
    if body.get("chat_template") is not None:
        raise bad_request(
            "chat_template is not accepted from clients; the server's operator chooses it with --chat-template",
            "chat_template",
        )
    kwargs = rules.template_kwargs | read_template_kwargs(body)
    continues = get(body, "continue_final_message", bool, False)
    prompts = get(body, "add_generation_prompt", bool, not continues)
    if continues and prompts:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other",
            "continue_final_message",
        )
    return Conversation(
        messages=messages,
        add_generation_prompt=prompts,
        continue_final_message=continues,
        template_kwargs=kwargs,
    )


def read_prompts(value: Any, rules: Rules, params: SamplingParams) -> list[Prompt]:
    """The prompts of a completion, as a list. Token ids are truncated as wanted and checked against
    the width of the logits."""
    if value is None:
        raise bad_request(
            "prompt is required: a string, a list of strings, token ids or a list of token id lists",
            "prompt",
        )
    if isinstance(value, str) or (
        isinstance(value, list) and value and not isinstance(value[0], (str, list))
    ):
        value = [value]
    if not isinstance(value, list):
        raise bad_request(
            f"prompt must be a string, a list of strings, token ids or a list of token id lists, got {shown(value)}",
            "prompt",
        )
    if not value:
        raise bad_request("prompt must not be empty", "prompt")
    if len(value) > MAX_PROMPTS:
        raise bad_request(f"at most {MAX_PROMPTS} prompts per request, got {len(value)}", "prompt")
    return [_read_prompt(prompt, type(value[0]), rules, params) for prompt in value]


def _read_prompt(prompt: Any, kind: type[Any], rules: Rules, params: SamplingParams) -> Prompt:
    if type(prompt) is not kind:
        raise bad_request("prompt must not mix texts and token ids", "prompt")
    if not prompt:
        raise bad_request("prompt must not be empty", "prompt")
    if isinstance(prompt, str):
        check_chars(len(prompt), rules, "prompt", params.truncate_prompt_tokens is not None)
        return prompt
    ids: list[Any] = params.truncated(list(prompt), rules.resolved.max_model_len)
    check_ids(ids, rules.resolved, "prompt")
    return ids


def check_chars(length: int, rules: Rules, param: str, truncated: bool = False) -> None:
    """Refuse a text that is too long before any work is spent on it."""
    if length > rules.most_chars(truncated):
        if truncated:
            raise bad_request(
                f"{param} has {length} characters; at most {rules.most_chars(True)} are tokenised to be truncated",
                param,
            )
        raise bad_request(
            f"this model's maximum context length is {rules.resolved.max_model_len} tokens, "
            f"which {length} characters cannot fit into; shorten the prompt",
            param,
            "context_length_exceeded",
        )


def check_ids(ids: list[Any], resolved: Resolved, param: str) -> None:
    """Token ids must be integers below the logits' width, and leave room for one more token."""
    check_length(len(ids), resolved, param)
    if not set(map(type, ids)) <= {int}:  # lists may be long, and true is no id
        wrong = next(id for id in ids if type(id) is not int)
        raise bad_request(
            f"{param} must hold token ids (integers), got {shown(wrong)}", param, "invalid_token_id"
        )
    for id in (min(ids), max(ids)):
        if not 0 <= id < resolved.vocab_size:
            message = f"{param} holds token id {id}, which is outside the vocabulary [0, {resolved.vocab_size})"
            raise bad_request(message, param, "invalid_token_id")


def check_length(tokens: int, resolved: Resolved, param: str) -> None:
    """A prompt must leave room for at least one token."""
    if tokens >= resolved.max_model_len:
        raise bad_request(
            f"this model's maximum context length is {resolved.max_model_len} tokens, but the prompt has {tokens} tokens "
            "and at least one must be generated; shorten the prompt",
            param,
            "context_length_exceeded",
        )


def read_chat_logprobs(body: dict[str, Any]) -> int | None:
    """`logprobs: true, top_logprobs: k` → k, `logprobs: false` → None."""
    wanted = get(body, "logprobs", bool, False)
    top = optional(body, "top_logprobs", int)
    if top is not None and (top < 0 or (top and not wanted)):
        raise bad_request(
            "top_logprobs needs logprobs: true"
            if top > 0
            else f"top_logprobs must be at least 0, got {top}",
            "top_logprobs",
        )
    return (top or 0) if wanted else None


def read_prompt_logprobs(params: SamplingParams, stream: bool) -> int | None:
    """`prompt_logprobs`, which a stream has no place for: there, echo shows a prompt's
    log-probabilities."""
    if stream and params.prompt_logprobs is not None:
        message = "prompt_logprobs is not available with stream: true; completions stream a prompt's log-probabilities with echo and logprobs"
        raise bad_request(message, "prompt_logprobs")
    return params.prompt_logprobs


def check_scored(lengths: list[int], params: SamplingParams) -> None:
    """Refuse prompts that are too long for the log-probabilities that are wanted of them."""
    if params.prompt_logprobs is None:
        return
    try:
        check_prompt_logprobs(lengths, params.prompt_logprobs, params.samples)
    except RequestError as error:
        raise bad_request(str(error), error.param) from None


def check_sampling(params: SamplingParams, resolved: Resolved, logprobs_name: str) -> None:
    """Limits that depend on the model and the server."""
    try:
        params.truncated([], resolved.max_model_len)
    except OptionError as error:
        raise option_error(error) from None
    for name, value in (
        (logprobs_name, params.logprobs),
        ("prompt_logprobs", params.prompt_logprobs),
    ):
        if value is not None and value > resolved.max_logprobs:
            raise bad_request(
                f"{name} must be at most {resolved.max_logprobs} (--max-logprobs), got {value}",
                name,
            )
    if params.priority and resolved.scheduling_policy != "priority":
        raise bad_request(
            "priority needs a server with --scheduling-policy priority; leave it out", "priority"
        )
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        highest = max(getattr(params, name) or (), default=0)
        if highest >= resolved.vocab_size:
            message = f"{name} holds {highest}, which is outside the vocabulary [0, {resolved.vocab_size})"
            raise bad_request(message, name, "invalid_token_id")


def check_best_of(params: SamplingParams, stream: bool) -> None:
    """Which choices are the best is known when all have ended, so they cannot be streamed."""
    if stream and params.samples > params.n and not params.use_beam_search:
        raise bad_request(
            f"best_of ({params.samples}) above n ({params.n}) cannot be streamed; leave out stream or best_of",
            "best_of",
        )


def clamp(params: SamplingParams, prompt_tokens: int, resolved: Resolved) -> SamplingParams:
    """`params` with max_tokens set to what the context still holds. They were checked when they
    were read, and lists in them may be long: what changes is checked alone, and prompts for which
    nothing does share them."""
    room = resolved.max_model_len - prompt_tokens
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    if limit == params.max_tokens:
        return params
    if params.min_tokens > limit:
        raise bad_request(
            f"min_tokens ({params.min_tokens}) must be at most max_tokens ({limit})", "min_tokens"
        )
    clamped = copy.copy(params)
    clamped.max_tokens = limit
    return clamped
