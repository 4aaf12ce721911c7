"""GET /openapi.json, and GET /docs with its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.server.openapi.document import document
from jaxllm.server.page.files import PageFiles

FOLDER = Path(__file__).parent / "static"


class OpenApi:
    """The document of `routes`, and the page that shows it."""

    def __init__(self, routes: Sequence[Route]):
        self._routes = routes
        self._page = PageFiles(FOLDER)

    def table(self) -> list[Route]:
        """Paths to handlers."""
        return [
            Route("/openapi.json", self.json),
            Route("/docs", self._page.index),
            Route("/docs/{name:path}", self._page.file),
        ]

    async def json(self, request: Request) -> Response:
        """GET /openapi.json"""
        body = document(self._routes, request.scope.get("root_path", ""))
        return Response(orjson.dumps(body), media_type="application/json")
