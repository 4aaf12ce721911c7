"""The constraint on what a request generates, in any of the fields that may hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxllm.grammar.pieces import Structured
from jaxllm.grammar.structure import StructureError, structure
from jaxllm.server.errors import bad_request, describe, sanitize
from jaxllm.server.requests.fields import read_optional

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


@dataclass(frozen=True, slots=True)
class Structure:
    """The constraint on a request's output, and the field that holds it."""

    field: str
    params: Structured


def read_structure(body: dict[str, Any]) -> Structure | None:
    """The constraint in `structured_outputs`, `response_format` or an older name; at most one of
    them may be sent. Raises ApiError(400)."""
    sent: dict[str, Any] = {
        name: {member: body[name]} for name, member in GUIDED.items() if body.get(name) is not None
    }
    if body.get("guided_json_object") is False:
        del sent["guided_json_object"]
    form = _response_format(body)
    if form is not None:
        sent["response_format"] = form
    sent |= {name: body[name] for name in STRUCTURE_OBJECTS if body.get(name) is not None}
    if len(sent) > 1:
        first, second, *_ = sent
        raise bad_request(
            f"{first} and {second} both constrain the output; send one of them", second
        )
    spacing = body.get("guided_whitespace_pattern")
    if sent and body.get("use_beam_search") is True:
        name = next(iter(sent))
        raise bad_request(f"{name} cannot be used in a beam search", name)
    for name, constraint in sent.items():
        if spacing is not None and isinstance(constraint, dict):
            constraint = {"whitespace_pattern": spacing} | constraint
        try:
            return Structure(name, structure(constraint))
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
    if form is None:
        return None
    form_type = form.get("type")
    if form_type == "text":
        return None
    if form_type == "json_object":
        return {"json_object": True}
    if form_type == "structural_tag":
        return {"structural_tag": form}
    if form_type != "json_schema":
        raise bad_request(
            "response_format.type must be text, json_object, json_schema or structural_tag, "
            f"got {describe(form_type)}",
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
