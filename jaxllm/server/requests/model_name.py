"""The name of the model that a request is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.server.errors import ApiError, bad_request, describe
from jaxllm.server.requests.fields import read_optional


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
