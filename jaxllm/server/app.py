"""The routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import jaxllm
from jaxllm.server.anthropic.endpoint import CountTokens, Messages
from jaxllm.server.anthropic.errors import envelope as anthropic_envelope
from jaxllm.server.anthropic.errors import is_messages_path
from jaxllm.server.anthropic.requests import MESSAGES_BODY
from jaxllm.server.by_model import ByModel
from jaxllm.server.endpoint import Json
from jaxllm.server.errors import ApiError, bad_request, sanitize, server_error
from jaxllm.server.generate import Chat, Completions
from jaxllm.server.metrics import exposition, load_metrics
from jaxllm.server.middleware.access_log import AccessLog
from jaxllm.server.middleware.auth import Auth
from jaxllm.server.middleware.drain import Drain
from jaxllm.server.middleware.load_header import LoadHeader
from jaxllm.server.middleware.request_id import RequestId
from jaxllm.server.middleware.response_start import ResponseStart
from jaxllm.server.native.endpoint import Native
from jaxllm.server.native.requests import NATIVE_BODY
from jaxllm.server.openapi.endpoint import OpenApi
from jaxllm.server.operator import OperatorRoutes
from jaxllm.server.page.files import PageFiles
from jaxllm.server.page.live import LiveStats
from jaxllm.server.pooling.cohere import COHERE_BODY, Embed
from jaxllm.server.pooling.requests import INPUT_BODY
from jaxllm.server.pooling.scoring import PAIR_BODY, Rerank, Score
from jaxllm.server.pooling.vectors import Classify, Embeddings, Pooling
from jaxllm.server.render import RenderChat, RenderCompletions
from jaxllm.server.replica import ReplicaRoutes, health, readiness
from jaxllm.server.requests.body_fields import BodyFields, joined
from jaxllm.server.requests.chat import CHAT_BODY
from jaxllm.server.requests.completion import COMPLETION_BODY
from jaxllm.server.requests.conversation import read_conversation
from jaxllm.server.requests.fields import read_field
from jaxllm.server.requests.known_fields import (
    CHAT_NEUTRAL,
    TOKENIZE_FIELDS,
    TOOL_FIELDS,
    refuse_unsupported,
)
from jaxllm.server.requests.limits import check_chars, check_ids
from jaxllm.server.requests.model_name import read_model
from jaxllm.server.responses.requests import RESPONSES_BODY
from jaxllm.server.responses.routes import ResponseRoutes
from jaxllm.server.responses.store import ResponseStore
from jaxllm.server.state import ServerState, Settings, page_of_cards
from jaxllm.server.transport.scope import route_path

TOKENIZE_BODY = BodyFields(
    names=TOKENIZE_FIELDS, sizes={"tokens": None}, token_ids=frozenset({"tokens"})
)
# Of all routes: a body is read before its route looks at it
BODY_FIELDS = joined(
    COMPLETION_BODY,
    CHAT_BODY,
    TOKENIZE_BODY,
    NATIVE_BODY,
    MESSAGES_BODY,
    RESPONSES_BODY,
    INPUT_BODY,
    COHERE_BODY,
    PAIR_BODY,
)


class Routes:
    """The routes that do not generate."""

    def __init__(self, server_state: ServerState):
        self._state = server_state

    async def health(self, request: Request) -> Response:
        """200 while the engine is idle or makes progress, else 503. Answered without the engine."""
        report = health(self._state)
        return Json(report, 200 if report["status"] == "ok" else 503)

    async def ready(self, request: Request) -> Response:
        """200 while new requests are accepted, else 503."""
        status = readiness(self._state)
        return Json({"status": status}, 200 if status == "ready" else 503)

    async def version(self, request: Request) -> Response:
        """The version of jaxllm."""
        return Json({"version": jaxllm.__version__})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        return Response(exposition(self._state.metrics), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """The served names."""
        return Json(page_of_cards([self._state]))

    async def model(self, request: Request) -> Response:
        """One served name; 404 for any other."""
        return Json(
            self._state.card(
                read_model({"model": request.path_params["id"]}, self._state.settings.served)
            )
        )

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        body = await self._state.bodies.read_json(dict(request.scope), request.receive)
        self._state.count_unknown_fields(body, TOKENIZE_FIELDS)
        read_model(body, self._state.settings.served, required=False)
        strings = read_field(body, "return_token_strs", bool, False)
        if body.get("messages") is not None:
            if body.get("prompt") is not None:
                raise bad_request(
                    "prompt and messages exclude each other; send one of them", "prompt"
                )
            refuse_unsupported(body, CHAT_NEUTRAL)
            ids = await self._state.render(read_conversation(body, self._state.rules))
        else:
            if body.get("prompt") is None:
                raise bad_request("prompt or messages is required", "prompt")
            refuse_unsupported(body, TOOL_FIELDS, "/tokenize with messages")
            text = read_field(body, "prompt", str, "")
            check_chars(len(text), self._state.rules, "prompt")
            if text:
                ids = await self._state.in_thread(
                    self._state.encode, text, read_field(body, "add_special_tokens", bool, True)
                )
            else:
                ids = []
        names = None
        if strings:
            names = [self._state.names.token_text(id) for id in ids]
        return Json(
            {
                "count": len(ids),
                "max_model_len": self._state.resolved.max_model_len,
                "tokens": ids,
                "token_strs": names,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        body = await self._state.bodies.read_json(dict(request.scope), request.receive)
        self._state.count_unknown_fields(body, frozenset({"model", "tokens"}))
        read_model(body, self._state.settings.served, required=False)
        if body.get("tokens") is None:
            raise bad_request("tokens is required", "tokens")
        ids = read_field(body, "tokens", list, [])
        if ids:
            ids = check_ids(ids, self._state.resolved, "tokens", generates=False)
        if self._state.tokenizer is None:
            raise bad_request("this server runs without a tokenizer", "tokens")
        return Json(
            {"prompt": await self._state.in_thread(self._state.tokenizer.decode, ids, False)}
        )


def build(*states: ServerState, missing: Sequence[Sequence[str]] = ()) -> Any:
    """The ASGI application: the routes behind keys and, if configured, CORS. Each of several models
    has its own. `missing` are the names of models that could not be loaded."""
    first, *others = states
    store = None
    if first.settings.response_store:
        store = ResponseStore()
    app: Any = routes(first, store)
    if others or missing:
        apps = [app, *(routes(state, store) for state in others)]
        app = ByModel(states, apps, refuse, missing)
    engines = [engine for state in states for engine in state.client.clients]
    app = LoadHeader(app, lambda: load_metrics([engine.stats for engine in engines]))
    return guarded(app, first.settings, lambda: first.draining)


def guarded(app: Any, settings: Settings, draining: Callable[[], bool]) -> Any:
    """An application behind what every request passes: it gets an id, is logged, must have a key,
    and is refused while the server stops. Pages of other origins are let in if configured."""
    app = Drain(app, draining, refuse)
    app = Auth(app, settings.api_keys, settings.admin_keys, refuse)
    app = AccessLog(app)
    app = RequestId(app)
    app = ResponseStart(app)
    cors = settings.cors
    if cors.origins:
        app = CORSMiddleware(
            app,
            allow_origins=cors.origins,
            allow_methods=cors.methods,
            allow_headers=cors.headers,
            allow_credentials=cors.credentials,
            expose_headers=("x-request-id",),
        )
    return app


def routes(server_state: ServerState, store: ResponseStore | None = None) -> Starlette:
    """Paths to handlers, and one error envelope for everything. `store` keeps responses."""
    handlers = Routes(server_state)
    table = [
        Route("/v1/completions", Completions(server_state), methods=["POST"]),
        Route("/v1/chat/completions", Chat(server_state), methods=["POST"]),
        Route("/v1/completions/render", RenderCompletions(server_state), methods=["POST"]),
        Route("/v1/chat/completions/render", RenderChat(server_state), methods=["POST"]),
        Route("/v1/messages", Messages(server_state), methods=["POST"]),
        Route("/v1/messages/count_tokens", CountTokens(server_state), methods=["POST"]),
        Route("/generate", Native(server_state), methods=["POST"]),
        *ResponseRoutes(server_state, store).table(),
        Route("/v1/embeddings", Embeddings(server_state), methods=["POST"]),
        Route("/v2/embed", Embed(server_state), methods=["POST"]),
        Route("/pooling", Pooling(server_state), methods=["POST"]),
        Route("/classify", Classify(server_state), methods=["POST"]),
        *(Route(path, Score(server_state), methods=["POST"]) for path in ("/score", "/v1/score")),
        *(
            Route(path, Rerank(server_state), methods=["POST"])
            for path in ("/rerank", "/v1/rerank", "/v2/rerank")
        ),
        Route("/v1/models", handlers.models),
        Route("/v1/models/{id:path}", handlers.model),
        Route("/tokenize", handlers.tokenize, methods=["POST"]),
        Route("/detokenize", handlers.detokenize, methods=["POST"]),
        Route("/health", handlers.health),
        Route("/ready", handlers.ready),
        Route("/version", handlers.version),
        Route("/metrics", handlers.metrics),
        Route("/ping", handlers.health, methods=["GET", "POST"]),
        *OperatorRoutes(server_state).table(),
        *ReplicaRoutes(server_state).table(),
        Route("/stats/stream", LiveStats(server_state), methods=["GET"]),
    ]
    if server_state.settings.page:
        page = PageFiles()
        table += [Route("/", page.index), Route("/page/{name:path}", page.file)]
    if server_state.settings.docs:
        table += OpenApi(list(table)).table()
    errors = {ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected}
    app = Starlette(routes=table, exception_handlers=errors)  # type: ignore[arg-type]
    app.router.redirect_slashes = False  # a redirect would be built from the Host header
    return app


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """An error as a whole HTTP reply, in the envelope of its route."""
    await (await _api_error(Request(scope), error))(scope, receive, send)


async def _api_error(request: Request, error: ApiError) -> Response:
    body: dict[str, Any] = error.envelope()
    if is_messages_path(route_path(request.scope)):
        body = anthropic_envelope(error, request.state.request_id)
    return Json(body, error.status, headers=error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    known = {
        404: ("there is no such route", "not_found"),
        405: ("this route does not take that method", "method_not_allowed"),
    }
    message, code = known.get(error.status_code, (sanitize(str(error.detail)), None))
    headers = dict(error.headers or {})
    return await _api_error(
        request, ApiError(error.status_code, message, code=code, headers=headers)
    )


async def _unexpected(request: Request, error: Exception) -> Response:
    return await _api_error(request, server_error())
