"""A log line of throughput for every ten seconds with work."""

from __future__ import annotations

import asyncio
import logging

from jaxllm.messages import EngineStats
from jaxllm.server.state import ServerState

INTERVAL = 10.0

logger = logging.getLogger("jaxllm.server")


async def log_stats(server_state: ServerState) -> None:
    """Runs until cancelled."""
    before = server_state.client.stats
    while True:
        await asyncio.sleep(INTERVAL)
        now = server_state.client.stats
        if now.steps < before.steps:  # another engine process
            before = EngineStats()
        if now.steps != before.steps or server_state.client.in_flight:
            hits, queries = (
                now.prefix_hits - before.prefix_hits,
                now.prefix_queries - before.prefix_queries,
            )
            logger.info(
                "prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, "
                "KV usage %.1f%%, prefix hits %.1f%%",
                (now.prompt_tokens - before.prompt_tokens) / INTERVAL,
                (now.generation_tokens - before.generation_tokens) / INTERVAL,
                now.running,
                now.waiting,
                100 * now.kv_usage,
                100 * hits / queries if queries else 0.0,
            )
        before = now
