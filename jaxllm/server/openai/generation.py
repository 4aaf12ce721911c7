"""What bodies of every generating endpoint have in common, as typed members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.prepared import count_logprobs
from jaxllm.sampling.options import SamplingParams
from jaxllm.server.errors import ApiError, bad_request, describe
from jaxllm.server.openai.fields import (
    NEUTRAL,
    Structure,
    read_field,
    read_optional,
    read_salt,
    read_sampling,
    read_stream,
    read_structure,
    read_transfer,
    refuse_unsupported,
)
from jaxllm.server.openai.limits import Rules, check_logprobs, check_sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request to either generating endpoint.

    Attributes:
        params: sampling options as they are wished (`prepared.prepared`).
        usage_at_end: whether a last chunk of a stream carries usage.
        usage_always: whether every chunk carries usage.
        echo: whether the reply repeats the prompt.
        prompt_logprobs: top entries of the reply's field of that name.
        tokens_as_ids: whether tokens are named by their ids.
        returns_token_ids: whether the reply has the ids of the prompt and of each choice.
        shares_pages: whether other engines may fetch the prompt's pages.
        page_offer: where such pages are.
    """

    model: str
    params: SamplingParams
    structure: Structure | None
    stream: bool
    usage_at_end: bool
    usage_always: bool
    echo: bool
    prompt_logprobs: int | None
    tokens_as_ids: bool
    returns_token_ids: bool
    cache_salt: str | None
    shares_pages: bool = False
    page_offer: dict[str, Any] | None = None


def read_generation(
    body: dict[str, Any],
    rules: Rules,
    neutral: dict[str, tuple[Any, ...]],
    names: dict[str, str],
    forced: dict[str, Any],
) -> dict[str, Any]:
    """The members of `Generation`. Raises ApiError that names the field at fault.

    `neutral` holds the endpoint's unsupported fields, `forced` the options that it reads itself,
    and `names` the fields of options that it calls otherwise.
    """
    model = read_model(body, rules.served)
    refuse_unsupported(body, NEUTRAL | neutral)
    structure = read_structure(body)
    stream, at_end, always = read_stream(body)
    params = read_sampling(body, rules.defaults, names, forced)
    check_sampling(params, stream, rules.resolved)
    check_logprobs(params, rules.resolved, names)
    shares_pages, page_offer = read_transfer(body, stream)
    return {
        "model": model,
        "params": params,
        "structure": structure,
        "stream": stream,
        "usage_at_end": at_end or rules.force_usage,
        "usage_always": always or rules.force_usage,
        "echo": read_field(body, "echo", bool, False),
        "prompt_logprobs": count_logprobs(params, "prompt_logprobs", rules.resolved),
        "tokens_as_ids": read_field(body, "return_tokens_as_token_ids", bool, False),
        "returns_token_ids": read_field(body, "return_token_ids", bool, False),
        "cache_salt": read_salt(body),
        "shares_pages": shares_pages,
        "page_offer": page_offer,
    }


def check_asked(query: Mapping[str, str], served: Sequence[str]) -> None:
    """Raise ApiError when a query is about a model that is not served."""
    read_model(dict(query), served, required=False)


def read_model(body: dict[str, Any], served: Sequence[str], required: bool = True) -> str:
    """The served name in the request, which may be left out when there is only one.

    Raises ApiError: 400 when it is missing and several are served, 404 when it is unknown.
    """
    name = read_optional(body, "model", str)
    if name is None:
        if required and len(served) > 1:
            raise bad_request(f"model is required; this server serves {', '.join(served)}", "model")
        return served[0]
    if name not in served:
        raise ApiError(
            404,
            f"the model {describe(name)} does not exist; this server serves {', '.join(served)}",
            param="model",
            code="model_not_found",
        )
    return name
