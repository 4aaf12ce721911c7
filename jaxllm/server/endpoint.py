"""What endpoints share whose requests the engine runs: from a body to a reply, or one error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson
from starlette.responses import Response

from jaxllm.messages import GenerateRequest, PoolingRequest
from jaxllm.server.engine.streams import Stream
from jaxllm.server.errors import ApiError
from jaxllm.server.state import ServerState
from jaxllm.server.transport.gone import ClientGone, until_gone

MANY_IDS = 1 << 16  # token ids of a request that are parsed in a thread


class Json(Response):
    """A JSON reply."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """starlette's hook."""
        return orjson.dumps(content)


class Endpoint:
    """An ASGI endpoint; subclasses parse a body, and run what it asks for.

    Attributes:
        param: field that holds the prompts.
        fields: every known field of a body.
    """

    param = ""
    fields: frozenset[str] = frozenset()

    def __init__(self, server_state: ServerState):
        self._state = server_state

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """ASGI; raises ApiError only before the first byte is sent."""
        try:
            body = await self._state.bodies.read_json(scope, receive)
            self._state.count_unknown_fields(body, self.fields)
            if has_many_ids(body.get(self.param) or body.get("input_ids")):
                request = await self._state.in_thread(self.parse, body)
            else:
                request = self.parse(body)
            gone = asyncio.ensure_future(until_gone(receive))
            try:
                with self._state.working():
                    await self._run(request, gone, send)
            finally:
                gone.cancel()
        except ClientGone:
            return
        except ApiError as error:
            if error.status < 500 or error.status == 503:
                self._state.edge_metrics.refused(error.code or "invalid")
            raise

    def parse(self, body: dict[str, Any]) -> Any:
        """The typed request. Raises ApiError."""
        raise NotImplementedError

    async def _run(self, request: Any, gone: asyncio.Future[None], send: Any) -> None:
        """Run it and send the reply. `gone` is done when the client has gone."""
        raise NotImplementedError

    def _submit(
        self, requests: Sequence[GenerateRequest | PoolingRequest], gone: asyncio.Future[None]
    ) -> Stream:
        """Send requests to the engine; their stream fails when the client goes."""
        stream = self._state.client.submit(requests)

        def fail_stream(_: asyncio.Future[None]) -> None:
            if not gone.cancelled():
                stream.fail(ClientGone())

        gone.add_done_callback(fail_stream)
        return stream


def has_many_ids(prompt: Any) -> bool:
    """Whether a prompt holds so many token ids that parsing it takes long."""
    if not isinstance(prompt, list) or len(prompt) > MANY_IDS:
        return isinstance(prompt, list)
    inner = [len(ids) for ids in prompt if type(ids) is list]
    return len(prompt) + sum(inner) > MANY_IDS


class Reply(NamedTuple):
    """A whole reply.

    Attributes:
        headers: more of them than its type and length.
    """

    body: bytes
    media_type: str = "application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()

    async def send(self, send: Any) -> None:
        """Send it, as ASGI has it."""
        length = str(len(self.body)).encode()
        headers = [(b"content-type", self.media_type.encode()), (b"content-length", length)]
        headers += self.headers
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


async def send_json(body: bytes, send: Any) -> None:
    """A whole reply."""
    await Reply(body).send(send)
