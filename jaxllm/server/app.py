"""The routes."""

from __future__ import annotations

from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import jaxllm
from jaxllm.server.chat import CHAT_NEUTRAL, refuse_tools
from jaxllm.server.edge import Edge
from jaxllm.server.errors import ApiError, bad_request, sanitize, server_error
from jaxllm.server.fields import get, refuse_unsupported
from jaxllm.server.gate import Gate
from jaxllm.server.generate import Chat, Completions
from jaxllm.server.messages import Profile, ResetPrefixes
from jaxllm.server.protocol import TOKENIZE_FIELDS, check_ids, read_conversation, read_model


class Json(Response):
    """A JSON reply."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """starlette's hook."""
        return orjson.dumps(content)


class Routes:
    """Everything that does not generate."""

    def __init__(self, edge: Edge):
        self._edge = edge

    async def health(self, request: Request) -> Response:
        """200 while the engine is idle or makes progress; 503 when it is dead or has stalled. Never asks the engine."""
        bridge, stats = self._edge.bridge, self._edge.bridge.stats
        silence = bridge.silence()
        state = "ok" if bridge.alive else "dead"
        if bridge.alive and silence > self._edge.settings.stall_seconds:
            state = "stalled"
        body = {"status": state, "running": stats.running, "waiting": stats.waiting, "last_step_age_s": round(silence, 3)}
        return Json(body, 200 if state == "ok" else 503)

    async def ready(self, request: Request) -> Response:
        """200 while new requests are welcome."""
        edge = self._edge
        state = "ready"
        if not edge.bridge.alive:
            state = "dead"
        elif edge.draining:
            state = "draining"
        elif edge.bridge.choices >= edge.bridge.capacity:
            state = "full"
        return Json({"status": state}, 200 if state == "ready" else 503)

    async def version(self, request: Request) -> Response:
        """The version of jaxllm."""
        return Json({"version": jaxllm.__version__})

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        return Response(self._edge.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def start_profile(self, request: Request) -> Response:
        """Begin a trace of the engine process."""
        await self._edge.bridge.ask(Profile(True))
        return Response()

    async def stop_profile(self, request: Request) -> Response:
        """End it and wait until it is written."""
        await self._edge.bridge.ask(Profile(False))
        return Response()

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget every cached prefix; 400 while requests run, unless the query says reset_running_requests=true."""
        running = request.query_params.get("reset_running_requests", "false").lower()
        if running not in ("true", "false", "1", "0"):
            raise bad_request("reset_running_requests must be true or false", "reset_running_requests")
        await self._edge.bridge.ask(ResetPrefixes(running in ("true", "1")))
        return Response()

    async def models(self, request: Request) -> Response:
        """The served names."""
        return Json({"object": "list", "data": [self._card(name) for name in self._edge.settings.served]})

    async def model(self, request: Request) -> Response:
        """One served name; 404 for any other."""
        return Json(self._card(read_model({"model": request.path_params["id"]}, self._edge.settings.served)))

    def _card(self, name: str) -> dict[str, Any]:
        edge = self._edge
        card = {"id": name, "object": "model", "created": edge.created, "owned_by": "jaxllm", "root": edge.settings.root}
        return card | {"parent": None, "max_model_len": edge.resolved.max_model_len, "permission": []}

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or of a conversation."""
        edge = self._edge
        body = await edge.bodies.read_json(dict(request.scope), request.receive)
        edge.note_unknown(body, TOKENIZE_FIELDS)
        read_model(body, edge.settings.served, required=False)
        strings = get(body, "return_token_strs", bool, False)
        refuse_tools(body)
        if body.get("messages") is not None:
            if body.get("prompt") is not None:
                raise bad_request("prompt and messages exclude each other; send one of them", "prompt")
            refuse_unsupported(body, CHAT_NEUTRAL)
            ids = await edge.in_thread(edge.render, read_conversation(body, edge.rules))
        else:
            if body.get("prompt") is None:
                raise bad_request("prompt or messages is required", "prompt")
            text = get(body, "prompt", str, "")
            edge.check_text(text, "prompt")
            ids = await edge.in_thread(edge.encode, text, get(body, "add_special_tokens", bool, True)) if text else []
        names = [edge.names.token_text(id) for id in ids] if strings else None
        return Json({"count": len(ids), "max_model_len": edge.resolved.max_model_len, "tokens": ids, "token_strs": names})

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids."""
        edge = self._edge
        body = await edge.bodies.read_json(dict(request.scope), request.receive)
        edge.note_unknown(body, frozenset({"model", "tokens"}))
        read_model(body, edge.settings.served, required=False)
        if body.get("tokens") is None:
            raise bad_request("tokens is required", "tokens")
        ids = get(body, "tokens", list, [])
        if ids:
            check_ids(ids, edge.resolved, "tokens")
        if edge.tokenizer is None:
            raise bad_request("this server runs without a tokenizer", "tokens")
        return Json({"prompt": await edge.in_thread(edge.tokenizer.decode, ids, False)})


def build(edge: Edge) -> Any:
    """The ASGI application. The router is reachable as `.routes` of `routes(edge)`, for tests that walk it."""
    app: Any = Gate(routes(edge), edge.settings.api_keys, edge.settings.admin_keys, lambda: edge.draining)
    if edge.settings.allowed_origins:
        app = CORSMiddleware(app, allow_origins=edge.settings.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    return app


def routes(edge: Edge) -> Starlette:
    """Paths to handlers, and one error envelope for everything."""
    plain = Routes(edge)
    table = [
        Route("/v1/completions", Completions(edge), methods=["POST"]),
        Route("/v1/chat/completions", Chat(edge), methods=["POST"]),
        Route("/v1/models", plain.models),
        Route("/v1/models/{id:path}", plain.model),
        Route("/tokenize", plain.tokenize, methods=["POST"]),
        Route("/detokenize", plain.detokenize, methods=["POST"]),
        Route("/health", plain.health),
        Route("/ready", plain.ready),
        Route("/version", plain.version),
        Route("/metrics", plain.metrics),
        Route("/ping", plain.health, methods=["GET", "POST"]),
        Route("/start_profile", plain.start_profile, methods=["POST"]),
        Route("/stop_profile", plain.stop_profile, methods=["POST"]),
        Route("/reset_prefix_cache", plain.reset_prefix_cache, methods=["POST"]),
    ]
    handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected}
    app = Starlette(routes=table, exception_handlers=handlers)  # type: ignore[arg-type]
    app.router.redirect_slashes = False  # a redirect would be built from the Host header
    return app


async def _api_error(request: Request, error: ApiError) -> Response:
    return Json(error.envelope(), error.status, headers=error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = {404: "there is no such route", 405: "this route does not take that method"}.get(
        error.status_code, sanitize(str(error.detail))
    )
    found = ApiError(error.status_code, message, code={404: "not_found", 405: "method_not_allowed"}.get(error.status_code))
    return Json(found.envelope(), error.status_code, headers=dict(error.headers or {}))


async def _unexpected(request: Request, error: Exception) -> Response:
    return Json(server_error().envelope(), 500)
