"""Admission without overcommitment, for engines that compute a request by the same programs
whatever runs beside it. Imports no jax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxllm.cache.pool import PagePool
from jaxllm.engine.scheduling.kv_manager import Start
from jaxllm.engine.scheduling.request import Request


def covered(
    pools: Sequence[PagePool], running: Iterable[Request], request: Request, start: Start
) -> bool:
    """Whether there are pages for all tokens that the `running` requests and this one, which would
    start so, may come to: then none is preempted and computed again, as a prompt. A choice may copy
    a page that it shares."""
    for kind, pool in enumerate(pools):
        left = pool.free - start.taken[kind]
        for r in (*running, request):
            held = (
                len(start.tables[kind].pages) + start.fresh[kind]
                if r is request
                else len(r.tables[kind].pages)
            )
            left -= max(
                0, pool.pages_for(len(r.prompt) + r.max_tokens) + (r.family is not None) - held
            )
        if left < 0:
            return False
    return True
