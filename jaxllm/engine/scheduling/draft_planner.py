"""Drafts of a step's decodes: how many they have, and what is known of them when the step has run.
Imports no jax.

A decode with drafts computes several tokens of its request at once. How many of them are right is
known when the step is committed. Until then `Request.computed` counts all, and `Request.verified`
none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from jaxllm.engine.scheduling.kv_manager import KVCacheManager
from jaxllm.engine.scheduling.plan import Decode
from jaxllm.engine.scheduling.request import Request, Status


class DraftPlanner:
    """Adds drafts to the decodes of a scheduler's steps. `wanted` says how many drafts there will
    be for a request's next step."""

    def __init__(self, kv_manager: KVCacheManager, wanted: Callable[[Request], int]):
        self._kv_manager = kv_manager
        self._wanted = wanted

    def extend(self, decodes: Sequence[Decode], spare_tokens: int) -> list[Decode]:
        """The decodes of the plan in the making with their drafts: at most `spare_tokens`, none
        beyond a request's `max_tokens`, and only such whose KV finds pages without preempting
        another request."""
        extended = []
        for decode in decodes:
            request = decode.request
            count = min(
                self._wanted(request),
                spare_tokens,
                request.max_tokens - request.num_scheduled_outputs,
            )
            # All drafts in flight may be accepted, which leaves so many tokens to be computed
            end = min(request.computed + count, request.kv_end)
            if end > request.capacity and not self._kv_manager.append(request, decode.first, end):
                count = request.capacity - request.computed
            if count > 0:
                request.computed += count
                request.drafts += count
                spare_tokens -= count
                decode = Decode(request, decode.first, 1 + count)
            extended.append(decode)
        return extended

    def judge(
        self,
        decodes: Sequence[Decode],
        tokens: Sequence[Sequence[int]],
        unused: Container[Request],
    ) -> None:
        """The step of these decodes has given these tokens, which are about to be appended. Of an
        `unused` row nothing is to be known any more: either the request ends, or `forget` was
        called."""
        for decode, row in zip(decodes, tokens, strict=False):
            request = decode.request
            if decode.count == 1 or not row or request in unused:
                continue
            # A row that the device ends gives nothing in the steps behind, which were counted too
            scheduled = request.num_scheduled_outputs + len(row) - 1
            request.num_scheduled_outputs = min(scheduled, request.max_tokens)
            # One that was preempted meanwhile has given its pages back
            if request.status is Status.RUNNING:
                request.computed -= decode.count - len(row)
                request.drafts -= decode.count - 1

    def forget(self, request: Request) -> None:
        """Drafts of the request in flight, which its only step in flight has, are not used."""
        request.computed = request.verified
        request.drafts = 0
