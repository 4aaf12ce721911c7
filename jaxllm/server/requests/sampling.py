"""The sampling options of a request."""

from __future__ import annotations

import re
from typing import Any

from jaxllm.sampling.options import OPTIONS, SamplingParams
from jaxllm.sampling.values import OptionError
from jaxllm.server.errors import bad_request
from jaxllm.server.requests.fields import whole

# Options of the library that no client may set.
NOT_ON_THE_WIRE = frozenset(
    {"guided_decoding", "structured_outputs", "logits_processors", "extra_args"}
)
WIRE_OPTIONS = tuple(name for name in OPTIONS if name not in NOT_ON_THE_WIRE)
INTEGERS = frozenset(name for name in WIRE_OPTIONS if OPTIONS[name].form in ("int", "ints"))


def read_sampling(
    body: dict[str, Any], defaults: dict[str, Any], names: dict[str, str], forced: dict[str, Any]
) -> SamplingParams:
    """The sampling options: `forced`, else the request's, else `defaults`, else the table's.

    `names` has the fields of options that the endpoint calls otherwise. Raises ApiError(400) that
    names the field.
    """
    values: dict[str, Any] = {}
    # A search draws nothing, so options that shape draws are left out
    if body.get("use_beam_search") is not True:
        values |= defaults
    values |= {name: body[name] for name in WIRE_OPTIONS if body.get(name) is not None}
    values |= forced
    values |= {name: whole(values[name]) for name in INTEGERS & values.keys()}
    try:
        return SamplingParams(**values)
    except OptionError as error:
        field = names.get(error.param, error.param)
        text = re.sub(rf"\b{error.param}\b", field, str(error))
        raise bad_request(text, field) from None
