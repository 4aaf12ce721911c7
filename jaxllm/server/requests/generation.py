"""What every request for generated tokens says, whatever its prompts are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxllm.messages import RequestError, check_salt
from jaxllm.prepared import count_logprobs
from jaxllm.sampling.options import SamplingParams
from jaxllm.server.errors import bad_request, describe
from jaxllm.server.requests.fields import check_json, read_field, read_optional
from jaxllm.server.requests.known_fields import NEUTRAL, refuse_unsupported
from jaxllm.server.requests.limits import Rules, check_logprobs, check_sampling
from jaxllm.server.requests.model_name import read_model
from jaxllm.server.requests.sampling import read_sampling
from jaxllm.server.requests.structure import Structure, read_structure

MAX_TRANSFER = 4096  # characters of kv_transfer_params
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """How the reply is sent.

    Attributes:
        enabled: whether it is a stream of events.
        usage_at_end: whether a last chunk of the stream carries usage.
        usage_always: whether every chunk carries usage.
    """

    enabled: bool
    usage_at_end: bool
    usage_always: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTransfer:
    """What other engines have to do with the prompt's pages.

    Attributes:
        shares: whether other engines may fetch them.
        offer: where such pages are, to be fetched; None where none are.
    """

    shares: bool = False
    offer: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What requests for completions and for chats share.

    Attributes:
        params: sampling options as they are wished (`prepared.prepared`).
        echo: whether the reply repeats the prompt.
        prompt_logprobs: top entries of the reply's field of that name.
        tokens_as_ids: whether tokens are named by their ids.
        returns_token_ids: whether the reply has the ids of the prompt and of each choice.
    """

    model: str
    params: SamplingParams
    structure: Structure | None
    streaming: Streaming
    echo: bool
    prompt_logprobs: int | None
    tokens_as_ids: bool
    returns_token_ids: bool
    cache_salt: str | None
    transfer: PageTransfer

    def with_structure_of(self, field: str) -> Generation:
        """The same, whose structure came in `field`, which errors then name."""
        if self.structure is None:
            return self
        return replace(self, structure=replace(self.structure, field=field))


def read_generation(
    body: dict[str, Any],
    rules: Rules,
    neutral: dict[str, tuple[Any, ...]],
    names: dict[str, str],
    forced: dict[str, Any],
) -> Generation:
    """The part of a body that is read alike in every dialect.

    Args:
        neutral: the endpoint's unsupported fields, with the values that request nothing.
        names: the fields of options that the endpoint calls otherwise.
        forced: the options that it reads itself.

    Raises:
        ApiError: names the field at fault.
    """
    model = read_model(body, rules.served)
    refuse_unsupported(body, NEUTRAL | neutral)
    structure = read_structure(body)
    streaming = read_streaming(body, rules.force_usage)
    params = read_sampling(body, rules.defaults, names, forced)
    check_sampling(params, streaming.enabled, rules.resolved)
    check_logprobs(params, rules.resolved, names)
    transfer = read_transfer(body, streaming.enabled)
    return Generation(
        model=model,
        params=params,
        structure=structure,
        streaming=streaming,
        echo=read_field(body, "echo", bool, False),
        prompt_logprobs=count_logprobs(params, "prompt_logprobs", rules.resolved),
        tokens_as_ids=read_field(body, "return_tokens_as_token_ids", bool, False),
        returns_token_ids=read_field(body, "return_token_ids", bool, False),
        cache_salt=read_salt(body),
        transfer=transfer,
    )


def read_streaming(body: dict[str, Any], force_usage: bool) -> Streaming:
    """`stream` and `stream_options`; with `force_usage` every chunk carries usage, whatever they
    say. Raises ApiError(400)."""
    enabled = read_field(body, "stream", bool, False)
    options = read_optional(body, "stream_options", dict)
    if options is not None and not enabled:
        raise bad_request(
            "stream_options is only allowed together with stream: true", "stream_options"
        )
    for name, value in (options or {}).items():
        if name not in STREAM_OPTIONS:
            raise bad_request(f"stream_options has no option {describe(name)}", "stream_options")
        read_field({f"stream_options.{name}": value}, f"stream_options.{name}", bool, False)
    wanted = {name for name, value in (options or {}).items() if value}
    return Streaming(
        enabled=enabled,
        usage_at_end=force_usage or "include_usage" in wanted,
        usage_always=force_usage or "continuous_usage_stats" in wanted,
    )


def read_transfer(body: dict[str, Any], streams: bool) -> PageTransfer:
    """`kv_transfer_params`. Raises ApiError(400)."""
    name = "kv_transfer_params"
    params = read_optional(body, name, dict)
    if params is None:
        return PageTransfer()
    check_json(name, params, MAX_TRANSFER)
    shares, fetches = (
        read_field({f"{name}.{flag}": params.get(flag)}, f"{name}.{flag}", bool, False)
        for flag in ("do_remote_decode", "do_remote_prefill")
    )
    if shares and fetches:
        raise bad_request(f"{name} asks for do_remote_decode or do_remote_prefill, not both", name)
    if shares and streams:
        raise bad_request(f"{name}.do_remote_decode is for answers that are not streamed", name)
    if not fetches:
        return PageTransfer(shares=shares)
    return PageTransfer(offer=params)


def read_salt(body: dict[str, Any]) -> str | None:
    """`cache_salt`. Raises ApiError(400)."""
    salt = body.get("cache_salt")
    if salt is None:
        return None
    try:
        check_salt(salt)
    except RequestError as error:
        raise bad_request(str(error), error.param) from None
    return str(salt)
