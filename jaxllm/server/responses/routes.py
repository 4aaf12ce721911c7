"""The routes below /v1/responses."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.server.errors import ApiError, bad_request, describe
from jaxllm.server.middleware.auth import caller, digests
from jaxllm.server.responses.background import Background
from jaxllm.server.responses.compact import Compact
from jaxllm.server.responses.count import InputTokens
from jaxllm.server.responses.create import Create
from jaxllm.server.responses.store import Owner, ResponseStore, Stored
from jaxllm.server.state import ServerState
from jaxllm.server.transport.gone import ClientGone, unless_gone, until_gone

MAX_LISTED = 100
LISTED = 20  # unless the request says how many


class Making:
    """An ASGI endpoint that makes a response for the owner of the request's key."""

    def __init__(self, routes: ResponseRoutes, create_type: type[Create]):
        self._routes = routes
        self._create_type = create_type

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI"""
        await self._routes.maker(self._create_type, scope)(scope, receive, send)


class Retrieving:
    """GET of a stored response: as it is, or its events from a place on."""

    def __init__(self, routes: ResponseRoutes):
        self._routes = routes

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI"""
        request = Request(scope, receive)
        response = self._routes.find(request)
        if not read_flag(request, "stream"):
            return await json_reply(response.json())(scope, receive, send)
        after = read_number(request, "starting_after", -1, None)
        if not isinstance(response, Background) or not response.streamed:
            raise bad_request(
                "only a response made with background: true and stream: true can be streamed later",
                "stream",
            )
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await unless_gone(gone, response.follow(after, send))
        except ClientGone:
            return
        finally:
            gone.cancel()


class ResponseRoutes:
    """What the routes share: the store."""

    def __init__(self, server_state: ServerState, store: ResponseStore | None):
        self._state = server_state
        self._store = store
        settings = server_state.settings
        self._keys = digests((*settings.api_keys, *settings.admin_keys))

    def table(self) -> list[Route]:
        """Paths to handlers."""
        path = "/v1/responses/{id}"
        return [
            Route("/v1/responses", Making(self, Create), methods=["POST"]),
            Route("/v1/responses/compact", Making(self, Compact), methods=["POST"]),
            Route("/v1/responses/input_tokens", Making(self, InputTokens), methods=["POST"]),
            Route(path, Retrieving(self), methods=["GET"]),
            Route(path, self.delete, methods=["DELETE"]),
            Route(f"{path}/cancel", self.cancel, methods=["POST"]),
            Route(f"{path}/input_items", self.input_items),
        ]

    def maker(self, create_type: type[Create], scope: dict[str, Any]) -> Create:
        """What makes one response."""
        return create_type(self._state, self._store, self._owner(scope))

    def find(self, request: Request) -> Stored:
        """The response that the path names. Raises ApiError(404)."""
        id = request.path_params["id"]
        response = self._need_store().find(id, self._owner(dict(request.scope)))
        if response is None:
            raise not_stored(
                f"no response with the id {describe(id)} is stored; the newest are kept in memory"
            )
        return response

    async def delete(self, request: Request) -> Response:
        """Forget a response; one that is still being made is stopped."""
        response = self.find(request)
        self._need_store().drop(response)
        return json_reply({"id": response.id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """Stop a response that is made in the background, and show it."""
        response = self.find(request)
        if not isinstance(response, Background):
            raise bad_request(
                "only a response made with background: true can be cancelled", "response_id"
            )
        response.cancel()
        if response.task is not None:
            await asyncio.wait((response.task,))
        return json_reply(response.json())

    async def input_items(self, request: Request) -> Response:
        """The items that a response was made from, page by page."""
        items = self.find(request).input_items()
        limit = read_number(request, "limit", LISTED, MAX_LISTED)
        order = request.query_params.get("order", "desc")
        after = request.query_params.get("after")
        if order not in ("asc", "desc"):
            raise bad_request(f"order must be asc or desc, got {describe(order)}", "order")
        if order == "desc":
            items.reverse()
        if after is not None:
            ids = [id for id, _ in items]
            if after not in ids:
                raise bad_request(
                    f"after names no item of this response: {describe(after)}", "after"
                )
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        return json_reply(
            {
                "object": "list",
                "data": [orjson.Fragment(item) for _, item in page],
                "first_id": page[0][0] if page else None,
                "last_id": page[-1][0] if page else None,
                "has_more": len(items) > limit,
            }
        )

    def _need_store(self) -> ResponseStore:
        if self._store is None:
            raise not_stored("this server stores no responses (--no-response-store)")
        return self._store

    def _owner(self, scope: dict[str, Any]) -> Owner:
        """Whose responses a request may see: the key's, or everybody's where no key is needed."""
        if not self._state.settings.api_keys:
            return b""
        return caller(scope["headers"], self._keys)


def not_stored(message: str) -> ApiError:
    """The 404 of a response that is not there."""
    return ApiError(404, message, param="response_id", code="response_not_found")


def json_reply(value: Any) -> Response:
    """A value, or what is JSON already, as a reply."""
    if isinstance(value, bytes):
        body = value
    else:
        body = orjson.dumps(value)
    return Response(body, media_type="application/json")


def read_flag(request: Request, name: str) -> bool:
    """A query parameter that is true or false. Raises ApiError(400)."""
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false"):
        raise bad_request(f"{name} must be true or false, got {describe(value)}", name)
    return value == "true"


def read_number(request: Request, name: str, default: int, most: int | None) -> int:
    """A query parameter that is a whole number; with `most`, from 1 to that. Raises
    ApiError(400)."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if text.isascii() and text.isdigit() and len(text) < 16:
        number = int(text)
    else:
        number = -1
    if number < 0 or (most is not None and not 1 <= number <= most):
        must = "a whole number"
        if most is not None:
            must = f"from 1 to {most}"
        raise bad_request(f"{name} must be {must}, got {describe(text)}", name)
    return number
