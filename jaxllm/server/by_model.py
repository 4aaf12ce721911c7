"""Several models behind one port: each request goes to the routes of its model.

A model has an engine, a state and routes of its own, as if it were served alone. This app reads
which model a request is for, and answers itself what is about all of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.server.endpoint import Json
from jaxllm.server.errors import ApiError, describe
from jaxllm.server.metrics import exposition
from jaxllm.server.middleware.auth import ADMIN_PATHS
from jaxllm.server.replica import health, readiness
from jaxllm.server.requests.bodies import PARSED
from jaxllm.server.requests.model_name import read_model
from jaxllm.server.state import ServerState, page_of_cards
from jaxllm.server.transport.gone import ClientGone
from jaxllm.server.transport.scope import route_path

# About one model, without a body: ?model= names it
ASKED = ADMIN_PATHS | {
    *("/stats/stream", "/server_info", "/get_server_info", "/is_sleeping", "/kv_event_sources")
}
MODELS = "/v1/models"
PING = "/ping"


class ByModel:
    """An ASGI app over the apps of several models, whose names differ."""

    def __init__(
        self,
        states: Sequence[ServerState],
        apps: Sequence[Starlette],
        refuse: Callable[[ApiError, dict[str, Any], Any, Any], Awaitable[None]],
        missing: Sequence[Sequence[str]] = (),
    ):
        """`missing` are the names of models that could not be loaded."""
        self._missing = {name: names[0] for names in missing for name in names}
        self._states = states
        self._apps = apps
        self._refuse = refuse
        self._app_of = {
            name: app
            for state, app in zip(states, apps, strict=True)
            for name in state.settings.served
        }
        self._names = [*self._app_of, *self._missing]
        # Limits of bodies follow from the context; the longest one lets every legal body pass
        self._bodies = max(states, key=lambda state: state.resolved.max_model_len).bodies
        self._answers: dict[str, Callable[[], Response]] = {
            "/metrics": self._metrics,
            "/health": self._health,
            PING: self._health,
            "/ready": self._ready,
            "/load": self._load,
            MODELS: self._list,
        }
        self._posts = {
            route.path
            for route in apps[0].routes
            if isinstance(route, Route) and "POST" in (route.methods or {"POST"})
        } - ASKED

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI"""
        path = route_path(scope)
        app: Any = self._apps[0]
        try:
            if path in self._answers and (path == PING or scope["method"] in ("GET", "HEAD")):
                app = self._answers[path]()
            elif path in ASKED:
                app = self._app_of[self._named(dict(Request(scope).query_params))]
            elif path.startswith(f"{MODELS}/"):
                name = path.removeprefix(f"{MODELS}/")
                if name:
                    app = self._app_of[self._named({"model": name})]
            elif scope["method"] == "POST" and path in self._posts:
                scope[PARSED] = await self._bodies.read_json(scope, receive)
                app = self._app_of[self._named(scope[PARSED])]
        except ClientGone:
            return
        except ApiError as error:
            return await self._refuse(error, scope, receive, send)
        await app(scope, receive, send)

    def _named(self, fields: dict[str, Any]) -> str:
        name = read_model(fields, self._names)
        if name in self._missing:
            raise ApiError(
                503,
                f"the model {describe(name)} could not be loaded; the server's log says why",
                param="model",
                code="model_not_loaded",
            )
        return name

    def _metrics(self) -> Response:
        metrics = [metric for state in self._states for metric in state.metrics]
        return Response(exposition(metrics), media_type=CONTENT_TYPE_LATEST)

    def _health(self) -> Response:
        """200 while a model serves: one that fails does not end the others."""
        reports = {state.settings.served[0]: health(state) for state in self._states}
        reports |= {name: {"status": "dead"} for name in self._missing.values()}
        serves = any(report["status"] == "ok" for report in reports.values())
        if serves:
            return Json({"status": "ok", "models": reports}, 200)
        return Json({"status": "dead", "models": reports}, 503)

    def _ready(self) -> Response:
        """200 while a model accepts requests."""
        statuses = {state.settings.served[0]: readiness(state) for state in self._states}
        statuses |= dict.fromkeys(self._missing.values(), "dead")
        if "ready" in statuses.values():
            return Json({"status": "ready", "models": statuses}, 200)
        status = statuses[self._states[0].settings.served[0]]
        return Json({"status": status, "models": statuses}, 503)

    def _load(self) -> Response:
        return Json({"server_load": sum(state.active for state in self._states)})

    def _list(self) -> Response:
        return Json(page_of_cards(self._states))
