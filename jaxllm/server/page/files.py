"""The files of the page at `/`, kept in memory: a few small ones, and no path leads out of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page loads its own files and talks to its own server, and nothing else. Trusted types keep the
# browser from ever parsing a string, such as a model's answer, as HTML.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class PageFile:
    """A file with its entity tag."""

    content: bytes
    type: str
    tag: str


class PageFiles:
    """Routes of a page. Browsers keep its files and ask each time whether they have changed."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): read(path)
            for path in folder.rglob("*")
            if path.suffix in TYPES
        }

    async def index(self, request: Request) -> Response:
        """The page."""
        return self._reply(request, "index.html")

    async def file(self, request: Request) -> Response:
        """One of its files."""
        return self._reply(request, request.path_params["name"])

    def _reply(self, request: Request, name: str) -> Response:
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        headers = HEADERS | {"etag": file.tag}
        if file.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=file.type)


def read(path: Path) -> PageFile:
    """A file of the page."""
    content = path.read_bytes()
    return PageFile(content, TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
