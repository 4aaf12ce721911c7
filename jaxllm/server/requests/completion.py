"""A request for what follows prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxllm.sampling.options import MAX_ALLOWED, SamplingParams
from jaxllm.server.errors import bad_request, describe
from jaxllm.server.requests.body_fields import BodyFields
from jaxllm.server.requests.fields import is_one_of, read_field, read_optional
from jaxllm.server.requests.generation import Generation, read_generation
from jaxllm.server.requests.known_fields import (
    CHAT_ONLY,
    COMPLETION_FIELDS,
    COMPLETION_NEUTRAL,
    refuse_unsupported,
)
from jaxllm.server.requests.limits import (
    MAX_PROMPTS,
    Rules,
    check_chars,
    check_choices,
    check_ids,
    check_suffix,
)

COMPLETION_BODY = BodyFields(
    names=COMPLETION_FIELDS,
    sizes={"prompt": None, "suffix": None, "allowed_token_ids": 12 * MAX_ALLOWED},
    prompts=frozenset({"prompt"}),
)
PROMPT_FORMS = "a string, a list of strings, token ids or a list of token id lists"

type PromptForm = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """POST /v1/completions.

    Attributes:
        generates: false when only the prompt is scored.
        suffix: the text that follows the completion.
    """

    generation: Generation
    prompts: list[PromptForm]
    add_special_tokens: bool
    generates: bool
    suffix: str | None


def parse_completion(body: dict[str, Any], rules: Rules) -> CompletionRequest:
    """The typed request. Raises ApiError that names the field at fault."""
    scoring = body.get("echo") is True and is_one_of(body.get("max_tokens"), (0,))
    forced = {"max_tokens": 1} if scoring else {}
    generation = read_generation(body, rules, COMPLETION_NEUTRAL, {}, forced)
    refuse_unsupported(body, CHAT_ONLY, "/v1/chat/completions")
    params = generation.params
    if generation.echo and params.logprobs is not None and params.use_beam_search:
        raise bad_request(
            "echo with logprobs cannot be combined with use_beam_search; leave one of them out",
            "echo",
        )
    suffix = read_optional(body, "suffix", str) or None
    if suffix is not None and body.get("prompt") == "":
        prompts: list[PromptForm] = [""]
    else:
        prompts = read_prompts(body.get("prompt"), rules, params)
    if suffix is not None:
        check_suffix(suffix, prompts, params, generation.echo, rules)
    check_choices(prompts, params)
    return CompletionRequest(
        generation=generation,
        prompts=prompts,
        add_special_tokens=read_field(body, "add_special_tokens", bool, True),
        generates=not scoring,
        suffix=suffix,
    )


def read_prompts(
    value: Any, rules: Rules, params: SamplingParams, field: str = "prompt"
) -> list[PromptForm]:
    """The prompts of a completion, from the value of `field`. Token ids are truncated as requested
    and checked. Raises ApiError."""
    if value is None:
        raise bad_request(f"{field} is required: {PROMPT_FORMS}", field)
    if isinstance(value, str) or (
        isinstance(value, list) and value and not isinstance(value[0], (str, list))
    ):
        value = [value]
    if not isinstance(value, list):
        raise bad_request(
            f"{field} must be {PROMPT_FORMS}, got {describe(value)}",
            field,
        )
    if not value:
        raise bad_request(f"{field} must not be empty", field)
    if len(value) > MAX_PROMPTS:
        raise bad_request(f"at most {MAX_PROMPTS} prompts per request, got {len(value)}", field)
    return [_read_prompt(prompt, type(value[0]), rules, params, field) for prompt in value]


def _read_prompt(
    prompt: Any, first: type[Any], rules: Rules, params: SamplingParams, field: str
) -> PromptForm:
    """One prompt, which must be of the same type as the `first`."""
    if type(prompt) is not first:
        raise bad_request(f"{field} must not mix texts and token ids", field)
    if not prompt:
        raise bad_request(f"{field} must not be empty", field)
    if isinstance(prompt, str):
        check_chars(len(prompt), rules, field, params.truncate_prompt_tokens is not None)
        return prompt
    ids: list[Any] = params.truncated(list(prompt), rules.resolved.max_model_len)
    return check_ids(ids, rules.resolved, field)
