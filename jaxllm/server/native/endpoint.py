"""POST /generate"""

from __future__ import annotations

from typing import Any

from jaxllm.server.generate import Completions
from jaxllm.server.native.replies import SglangReply, VllmReply
from jaxllm.server.native.requests import NATIVE_FIELDS, NativeRequest, parse_native
from jaxllm.server.openai.replies import Reply, ReplySpec


class Native(Completions):
    """POST /generate"""

    fields = NATIVE_FIELDS

    def parse(self, body: dict[str, Any]) -> NativeRequest:
        """See `requests.parse_native`."""
        return parse_native(body, self._state.rules)

    def new_reply(self, id: str, request: NativeRequest, spec: ReplySpec) -> Reply:
        """The reply in the form of the request."""
        form = SglangReply if request.sglang else VllmReply
        reply = form(
            id,
            request.generation.model,
            self._state.fingerprint,
            spec,
            request.generation.params.n,
            self._state.names,
        )
        if isinstance(reply, SglangReply):
            reply.batch = request.batch
        return reply
