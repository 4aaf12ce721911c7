"""What probes ask of a model: whether its engine makes progress, whether requests are accepted."""

from __future__ import annotations

from typing import Any

from jaxllm.server.state import ServerState


def health(server_state: ServerState) -> dict[str, Any]:
    """`status` is "ok" while the engine is idle or makes progress. Known without the engine."""
    client, stats = server_state.client, server_state.client.stats
    silence = client.seconds_without_step()
    status = "ok" if client.alive else _absence(server_state)
    if client.alive and silence > server_state.settings.stall_seconds:
        status = "stalled"
    return {
        "status": status,
        "running": stats.running,
        "waiting": stats.waiting,
        "last_step_age_s": round(silence, 3),
    }


def readiness(server_state: ServerState) -> str:
    """ "ready" while new requests are accepted, else the reason why not."""
    client = server_state.client
    if not client.alive:
        return _absence(server_state)
    if server_state.draining:
        return "draining"
    return "full" if client.choices >= client.capacity else "ready"


def _absence(server_state: ServerState) -> str:
    return "restarting" if server_state.client.restarting else "dead"
