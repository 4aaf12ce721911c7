"""Strict reading of JSON request bodies: exact types (true is no integer, "5" is no number, 8.0 is
one), and null is the same as absent."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import orjson

from jaxllm.grammar.structure import StructureError, check_size
from jaxllm.sampling.options import OPTIONS, SamplingParams
from jaxllm.sampling.values import EXACT_FLOAT, OptionError
from jaxllm.server.errors import bad_request, describe, sanitize

# Options of the library that no client may set.
NOT_ON_THE_WIRE = frozenset(
    {"guided_decoding", "structured_outputs", "logits_processors", "extra_args"}
)
WIRE_OPTIONS = tuple(name for name in OPTIONS if name not in NOT_ON_THE_WIRE)
INTEGERS = frozenset(name for name in WIRE_OPTIONS if OPTIONS[name].kind in ("int", "ints"))

# Known fields that change nothing here, whatever they hold.
IGNORED = frozenset(
    "user metadata store service_tier prompt_cache_key prompt_cache_retention "
    "safety_identifier request_id session_id verbosity "
    "guided_decoding_backend".split()
)

# Fields of features that are not supported yet, with the values that request nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "prompt_embeds": ([],),
    "vllm_xargs": ({},),
    "extra_args": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "watermarking": (),
    "return_prompt_text": (False,),
    "truncation_side": ("left",),
    **dict.fromkeys(("beam_width", "json_schema"), ()),
    **dict.fromkeys(("regex", "ebnf", "grammar"), ("",)),
}

# Fields of other servers, or of the other endpoint, with their names here.
OTHER_NAMES = {
    "beam_width": "use_beam_search with best_of",
    **dict.fromkeys(("regex", "ebnf", "grammar", "json_schema"), "structured_outputs"),
    "top_logprobs": "logprobs",
    "max_completion_tokens": "max_tokens",
}

_KINDS = {
    bool: "true or false",
    int: "an integer",
    str: "a string",
    dict: "an object",
    list: "a list",
}


def read_json(text: bytes) -> Any:
    """A body, or a part of one, as JSON. Raises ApiError(400)."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise bad_request(
            f"the body is not valid JSON: {sanitize(str(error))}", code="invalid_json"
        ) from None


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError(400)."""
    value = read_json(body)
    if not isinstance(value, dict):
        raise bad_request(
            f"the body must be a JSON object, got {describe(value)}", code="invalid_json"
        )
    return value


def check_json(name: str, value: Any, max_chars: int) -> None:
    """Raises ApiError(400) on JSON that is too deep or too large."""
    try:
        check_size(name, value, max_chars)
    except StructureError as error:
        raise bad_request(str(error), name) from None


def read_field[T](body: dict[str, Any], name: str, kind: type[T], default: T) -> T:
    """`body[name]`, which must be of type `kind`; absent and null give the default."""
    value = body.get(name)
    if value is None:
        return default
    if kind is int:
        value = whole(value)
    if type(value) is not kind:
        raise bad_request(f"{name} must be {_KINDS[kind]}, got {describe(value)}", name)
    return value


def read_optional[T](body: dict[str, Any], name: str, kind: type[T]) -> T | None:
    """Like `read_field`, with None for absent."""
    return None if body.get(name) is None else read_field(body, name, kind, kind())


def refuse_unsupported(
    body: dict[str, Any], table: dict[str, tuple[Any, ...]], elsewhere: str | None = None
) -> None:
    """Raise ApiError(400) on the first field of `table` that requests something; `elsewhere` names
    the endpoint that supports it."""
    for name, neutral in table.items():
        value = body.get(name)
        if value is not None and not is_one_of(value, neutral):
            remedy = (
                "yet; leave it out"
                if elsewhere is None
                else f"here, but in {elsewhere}; leave it out"
            )
            if name in OTHER_NAMES:
                remedy = f"here; send {OTHER_NAMES[name]}"
            raise bad_request(f"{name} is not supported {remedy}", name, "unsupported_parameter")


def is_one_of(value: Any, allowed: Iterable[Any]) -> bool:
    """Membership that tells true from 1; 1.0 counts as 1."""
    value = whole(value)
    return any(type(value) is type(x) and value == x for x in allowed)


def whole(value: Any) -> Any:
    """`8.0` as the integer 8, also in a list; other values unchanged. Larger floats may be rounded
    integers."""
    if type(value) is list and float in set(map(type, value)):
        return [whole(item) for item in value]
    if type(value) is float and value.is_integer() and abs(value) <= EXACT_FLOAT:
        return int(value)
    return value


def read_sampling(
    body: dict[str, Any], defaults: dict[str, Any], names: dict[str, str], forced: dict[str, Any]
) -> SamplingParams:
    """The sampling options: `forced`, else the request's, else `defaults`, else the table's.

    `names` has the fields of options that the endpoint calls otherwise. Raises ApiError(400) that
    names the field.
    """
    # A search draws nothing, so options that shape draws are left out
    searches = body.get("use_beam_search") is True
    values = {} if searches else dict(defaults)
    values |= {name: body[name] for name in WIRE_OPTIONS if body.get(name) is not None}
    values |= forced
    values |= {name: whole(values[name]) for name in INTEGERS & values.keys()}
    try:
        return SamplingParams(**values)
    except OptionError as error:
        field = names.get(error.param, error.param)
        text = re.sub(rf"\b{error.param}\b", field, str(error))
        raise bad_request(text, field) from None
