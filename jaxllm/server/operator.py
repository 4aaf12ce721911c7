"""What operators have the engine do: traces, forgetting prefixes, sleep, other weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.commands import Profile, ResetPrefixCache, Sleep, UpdateWeights, WakeUp
from jaxllm.config import ConfigError
from jaxllm.locate import locate
from jaxllm.server.errors import bad_request, describe, overloaded
from jaxllm.server.requests.fields import read_field
from jaxllm.server.requests.model_name import check_asked, read_model
from jaxllm.server.state import ServerState
from jaxllm.server.transport.gone import unless_gone, until_gone

MODES = ("abort", "wait")
LEVELS = ("1", "2")
PARTS = {"weights", "kv_cache"}  # vLLM's names of what wakes


class OperatorRoutes:
    """Commands to the engine; each answers when it is carried out. All need an operator's key."""

    def __init__(self, server_state: ServerState):
        self._state = server_state

    def table(self) -> list[Route]:
        """Paths to handlers."""
        handlers = {
            "/start_profile": self.start_profile,
            "/stop_profile": self.stop_profile,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
            "/update_weights": self.update_weights,
        }
        return [Route(path, handler, methods=["POST"]) for path, handler in handlers.items()]

    async def start_profile(self, request: Request) -> Response:
        """Begin a trace of the engine process."""
        self._query(request)
        await self._state.client.run_command(Profile(True))
        return Response()

    async def stop_profile(self, request: Request) -> Response:
        """End it and wait until it is written."""
        self._query(request)
        await self._state.client.run_command(Profile(False))
        return Response()

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget every cached prefix; 400 while requests run, unless the query says
        reset_running_requests=true."""
        query = self._query(request, "reset_running_requests")
        await self._check_body(request)
        running = query.get("reset_running_requests", "false").lower()
        if running not in ("true", "false", "1", "0"):
            raise bad_request(
                "reset_running_requests must be true or false", "reset_running_requests"
            )
        await self._state.client.run_command(ResetPrefixCache(running in ("true", "1")))
        return Response()

    async def sleep(self, request: Request) -> Response:
        """Free device memory. The query has `level`, 1 (weights wait in host memory) or 2 (they are
        read again), and `mode`: requests in flight are aborted, or waited for, as long as who asks
        waits. Meanwhile no other begins. What was aborted for is done, whoever still waits."""
        query = self._query(request, "level", "mode")
        await self._check_body(request)
        level = query.get("level", "1")
        mode = query.get("mode", "abort")
        if level not in LEVELS:
            raise bad_request(
                "level must be 1 (weights to host memory) or 2 (weights dropped), "
                f"got {describe(level)}",
                "level",
            )
        if mode not in MODES:
            raise bad_request(f"mode must be abort or wait, got {describe(mode)}", "mode")
        with self._state.at_rest():
            if mode == "abort":
                self._state.client.fail_all(
                    lambda: overloaded("the model was put to sleep; POST /wake_up", "sleeping")
                )
                await self._state.idle.wait()
            else:
                await self._idle_unless_gone(request)
            await self._state.client.run_command(Sleep(int(level)))
        return Response()

    async def _idle_unless_gone(self, request: Request) -> None:
        """Wait for requests in flight, as long as who asks waits."""
        gone = asyncio.ensure_future(until_gone(request.receive))
        try:
            await unless_gone(gone, self._state.idle.wait())
        finally:
            gone.cancel()

    async def wake_up(self, request: Request) -> Response:
        """Take the memory again, all of it: `tags`, if there are any, name both parts."""
        tags = self._query(request, "tags").getlist("tags")
        await self._check_body(request)
        if tags and set(tags) != PARTS:
            raise bad_request(
                "a model wakes as a whole: leave tags out, or name weights and kv_cache", "tags"
            )
        await self._state.client.run_command(WakeUp())
        return Response()

    async def update_weights(self, request: Request) -> Response:
        """Take the weights of the checkpoint `path` in place of those of now; 400 while requests
        run, and when it does not fit."""
        self._query(request)
        body = await self._state.bodies.read_json(dict(request.scope), request.receive)
        read_model(body, self._state.settings.served, required=False)
        check_known(body, ("path",))
        path = read_field(body, "path", str, "")
        if not path:
            raise bad_request("path is required: a directory or a Hugging Face id", "path")
        try:
            directory = await self._state.in_thread(locate, path, None, None)
        except ConfigError as error:
            raise bad_request(str(error), "path") from None
        await self._state.client.run_command(UpdateWeights(str(directory)))
        return Response()

    def _query(self, request: Request, *known: str) -> QueryParams:
        """The query. Raises ApiError for an unknown name, a name given twice (except `tags`), or a
        `model` that is not served."""
        query = request.query_params
        check_asked(query, self._state.settings.served)
        check_known(query, known)
        several = (name for name in query if len(query.getlist(name)) > 1 and name != "tags")
        if (twice := next(several, None)) is not None:
            raise bad_request(f"{twice} is there twice", twice)
        return query

    async def _check_body(self, request: Request) -> None:
        """Raise ApiError for a body that says anything: the query does. Profiles take any, because
        load generators send them a request of theirs."""
        headers = request.headers
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return
        body = await self._state.bodies.read_json(dict(request.scope), request.receive)
        if name := next(iter(body), None):
            raise bad_request(
                f"{describe(name)} has no effect in the body; say it in the query, as in "
                "/sleep?level=2",
                name[:64],
            )


def check_known(fields: Iterable[str], known: Sequence[str]) -> None:
    """Raise ApiError for a name that is neither `known` nor `model`."""
    unknown = next((name for name in fields if name not in (*known, "model")), None)
    if unknown is not None:
        takes = ", ".join((*known, "model"))
        raise bad_request(f"no {describe(unknown)} is known here, but {takes}", unknown[:64])
