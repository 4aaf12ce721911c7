"""Strict reading of JSON request bodies: exact types (true is no integer, "5" is no number, 8.0 is
one), and null is the same as absent."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from jaxllm.grammar.pieces import Structured
from jaxllm.grammar.structure import StructureError, check_size, structure
from jaxllm.messages import RequestError, check_salt
from jaxllm.sampling.options import OPTIONS, SamplingParams
from jaxllm.sampling.values import EXACT_FLOAT, OptionError
from jaxllm.server.errors import bad_request, describe, sanitize

MAX_TRANSFER = 4096  # characters of kv_transfer_params
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

# Older names of the members of `structured_outputs`.
GUIDED = {
    "guided_json": "json",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
STRUCTURE_OBJECTS = ("structured_outputs", "guided_decoding")  # names of one field
STRUCTURE_FIELDS = (*GUIDED, *STRUCTURE_OBJECTS, "guided_whitespace_pattern", "response_format")

_KINDS = {
    bool: "true or false",
    int: "an integer",
    str: "a string",
    dict: "an object",
    list: "a list",
}


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


@dataclass(frozen=True, slots=True)
class Structure:
    """The constraint on a request's output, and the field that holds it."""

    field: str
    params: Structured


def read_structure(body: dict[str, Any]) -> Structure | None:
    """The constraint in `structured_outputs`, `response_format` or an older name; at most one of
    them may be sent. Raises ApiError(400)."""
    given_fields: dict[str, Any] = {
        name: {kind: body[name]} for name, kind in GUIDED.items() if body.get(name) is not None
    }
    if body.get("guided_json_object") is False:
        del given_fields["guided_json_object"]
    if (form := _response_format(body)) is not None:
        given_fields["response_format"] = form
    given_fields |= {name: body[name] for name in STRUCTURE_OBJECTS if body.get(name) is not None}
    if len(given_fields) > 1:
        first, second, *_ = given_fields
        raise bad_request(
            f"{first} and {second} both constrain the output; send one of them", second
        )
    spacing = body.get("guided_whitespace_pattern")
    if given_fields and body.get("use_beam_search") is True:
        raise bad_request(
            f"{next(iter(given_fields))} cannot be used in a beam search", next(iter(given_fields))
        )
    for name, given in given_fields.items():
        if spacing is not None and isinstance(given, dict):
            given = {"whitespace_pattern": spacing} | given
        try:
            return Structure(name, structure(given))
        except StructureError as error:
            raise bad_request(f"{name}: {sanitize(str(error))}", name) from None
    if spacing is not None:
        raise bad_request(
            "guided_whitespace_pattern has no effect without guided_json; leave it out",
            "guided_whitespace_pattern",
        )
    return None


def _response_format(body: dict[str, Any]) -> dict[str, Any] | None:
    """`response_format` as a structure; None for text."""
    form = read_optional(body, "response_format", dict)
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": form}
    if kind != "json_schema":
        raise bad_request(
            "response_format.type must be text, json_object, json_schema or structural_tag, "
            f"got {describe(kind)}",
            "response_format",
        )
    wrapped = form.get("json_schema")
    if (
        not isinstance(wrapped, dict)
        or not isinstance(wrapped.get("name"), str)
        or wrapped.get("schema") is None
    ):
        raise bad_request(
            'response_format.json_schema must be {"name": text, "schema": object}',
            "response_format",
        )
    return {"json": wrapped["schema"]}


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


def read_transfer(body: dict[str, Any], stream: bool) -> tuple[bool, dict[str, Any] | None]:
    """Of `kv_transfer_params`: whether other engines may fetch the prompt's pages, and the object
    when it says where they are. Raises ApiError(400)."""
    name = "kv_transfer_params"
    given = read_optional(body, name, dict)
    if given is None:
        return False, None
    check_json(name, given, MAX_TRANSFER)
    shares, fetches = (
        read_field({f"{name}.{flag}": given.get(flag)}, f"{name}.{flag}", bool, False)
        for flag in ("do_remote_decode", "do_remote_prefill")
    )
    if shares and fetches:
        raise bad_request(f"{name} asks for do_remote_decode or do_remote_prefill, not both", name)
    if shares and stream:
        raise bad_request(f"{name}.do_remote_decode is for answers that are not streamed", name)
    return shares, given if fetches else None


def read_stream(body: dict[str, Any]) -> tuple[bool, bool, bool]:
    """(stream, usage at the end, usage on every chunk)."""
    stream = read_field(body, "stream", bool, False)
    options = read_optional(body, "stream_options", dict)
    if options is None:
        return stream, False, False
    if not stream:
        raise bad_request(
            "stream_options is only allowed together with stream: true", "stream_options"
        )
    for name in options:
        if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            raise bad_request(f"stream_options has no option {describe(name)}", "stream_options")
        read_field({f"stream_options.{name}": options[name]}, f"stream_options.{name}", bool, False)
    return stream, bool(options.get("include_usage")), bool(options.get("continuous_usage_stats"))
