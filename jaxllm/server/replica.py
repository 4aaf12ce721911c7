"""What probes, routers and gateways ask a replica, beside metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import jaxllm
from jaxllm.kv_events.settings import EVERYWHERE, KVEventSettings
from jaxllm.server.endpoint import Json
from jaxllm.server.engine.client import EngineClient
from jaxllm.server.engine.group import EngineGroup
from jaxllm.server.requests.model_name import check_asked
from jaxllm.server.state import ServerState


class ReplicaRoutes:
    """Answers from what the server knows; none waits for the engine."""

    def __init__(self, server_state: ServerState):
        self._state = server_state

    def table(self) -> list[Route]:
        """Paths to handlers."""
        return [
            Route("/load", self.load),
            Route("/server_info", self.server_info),
            Route("/get_server_info", self.server_info),  # SGLang's name
            Route("/is_sleeping", self.is_sleeping),
            Route("/kv_event_sources", self.kv_event_sources),
        ]

    async def load(self, request: Request) -> Response:
        """HTTP requests that generate now."""
        return Json({"server_load": self._state.active})

    async def is_sleeping(self, request: Request) -> Response:
        """Whether the engine has given its memory back."""
        self._check_model(request)
        return Json({"is_sleeping": self._state.client.stats.sleep_level > 0})

    async def server_info(self, request: Request) -> Response:
        """What was decided at start, under the names that routers read, and all of it. Nothing in
        it is secret."""
        self._check_model(request)
        resolved = self._state.resolved
        settings = self._state.settings
        return Json(
            {
                "version": jaxllm.__version__,
                "model_path": settings.root,
                "served_model_name": settings.served[0],
                "served_model_names": settings.served,
                "tp_size": resolved.tensor_parallel_size,
                "pp_size": resolved.pipeline_parallel_size,
                "dp_size": len(self._state.client.clients),
                "max_model_len": resolved.max_model_len,
                "max_num_seqs": resolved.max_num_seqs,
                "block_size": resolved.page_size,
                "num_gpu_blocks": resolved.num_pages,
                "max_total_num_tokens": min(resolved.group_pages) * resolved.page_size,
                "created": self._state.created,
                "resolved": dataclasses.asdict(resolved) | {"num_pages": resolved.num_pages},
            }
        )

    async def kv_event_sources(self, request: Request) -> Response:
        """Where KV events are published; an empty list when they are not."""
        self._check_model(request)
        events = self._state.settings.kv_events
        if events is None or events.publisher == "null":
            return Json([])
        host, port = request.scope.get("server") or (None, None)
        reached = host if port is not None else None  # a Unix socket has none
        count = len(self._state.client.clients)
        if count > 1:
            engine_events = [events.of_engine(number) for number in range(count)]
        else:
            engine_events = [events]
        return Json([source(settings, reached) for settings in engine_events])

    def _check_model(self, request: Request) -> None:
        """Raise ApiError when the query names a model that is not served."""
        check_asked(request.query_params, self._state.settings.served)


def source(events: KVEventSettings, host: str | None) -> dict[str, Any]:
    """Where one engine's events are published, for a client that reached this server at `host`."""
    replay = events.replay_endpoint
    return {
        "data_parallel_rank": events.data_parallel_rank,
        "endpoint": reachable(events.endpoint, host),
        "replay_endpoint": replay and reachable(replay, host),
        "topic": events.topic,
    }


def reachable(address: str, host: str | None) -> str:
    """An address that is bound on all interfaces, at the one by which the client reached this
    server; any other as it is."""
    if host is None:
        return address
    return EVERYWHERE.sub(f"tcp://{f'[{host}]' if ':' in host else host}:", address)


def health(server_state: ServerState) -> dict[str, Any]:
    """`status` is "ok" while every engine is idle or makes progress, else what the first other one
    does; of several engines each is listed. Known without the engines."""
    engines = [
        engine_health(client, server_state.settings.stall_seconds)
        for client in server_state.client.clients
    ]
    if len(engines) == 1:
        return engines[0]
    return {
        "status": next((engine["status"] for engine in engines if engine["status"] != "ok"), "ok"),
        "running": sum(engine["running"] for engine in engines),
        "waiting": sum(engine["waiting"] for engine in engines),
        "last_step_age_s": max(engine["last_step_age_s"] for engine in engines),
        "engines": engines,
    }


def engine_health(client: EngineClient, stall_seconds: float) -> dict[str, Any]:
    """The same of one engine, which is "stalled" after so many seconds without a step."""
    stats = client.stats
    silence = client.seconds_without_step()
    status = "ok"
    if not client.alive:
        status = _absence(client)
    if client.alive and silence > stall_seconds:
        status = "stalled"
    return {
        "status": status,
        **({"progress": client.progress.text} if status == "restarting" else {}),
        "running": stats.running,
        "waiting": stats.waiting,
        "last_step_age_s": round(silence, 3),
    }


def readiness(server_state: ServerState) -> str:
    """ "ready" while new requests are accepted, else the reason why not."""
    client = server_state.client
    if not client.alive:
        return _absence(client)
    if server_state.draining:
        return "draining"
    if server_state.resting or client.stats.sleep_level:
        return "sleeping"
    if client.choices >= client.capacity:
        return "full"
    return "ready"


def _absence(client: EngineClient | EngineGroup) -> str:
    if client.restarting:
        return "restarting"
    return "dead"
