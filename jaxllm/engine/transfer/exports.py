"""What a step does for other engines, which want pages of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxllm.engine.scheduling.plan import Chunk
from jaxllm.engine.scheduling.request import Request
from jaxllm.messages import TextDelta


class PageExports(Protocol):
    """The part of a step that lets pages leave for other engines.

    It changes the deltas of a step, so it is no observer. A step calls its methods in this order:
    `take` behind the forward and before anything is committed, because forced tokens may end a
    request and free its pages; `answers` behind the draw; `export`, and `forget` for each request
    whose keys and values are wrong, when the step is committed; `settle` with all deltas of the
    turn.
    """

    def announce(self, request: Request) -> None:
        """Let other engines wait for the pages of a new request's prompt."""

    def take(self, chunks: Sequence[Chunk]) -> None:
        """Take the pages that a launched step completes out of the pool."""

    def answers(self, chunks: Sequence[Chunk]) -> list[Request]:
        """Requests of a launched step that get their only delta now, before they have a token."""

    def export(self, chunks: Sequence[Chunk]) -> None:
        """Offer the pages of a collected step."""

    def forget(self, keys: list[bytes]) -> None:
        """Drop pages whose contents cannot be trusted."""

    def settle(self, deltas: list[TextDelta]) -> list[TextDelta]:
        """The deltas of a turn without those that follow an answer."""

    def clear(self) -> None:
        """Forget all requests."""


class NoExports:
    """`PageExports` of an engine that keeps its pages to itself."""

    def announce(self, request: Request) -> None:
        """Nobody waits."""

    def take(self, chunks: Sequence[Chunk]) -> None:
        """No pages leave."""

    def answers(self, chunks: Sequence[Chunk]) -> list[Request]:
        """No request ends before its token."""
        return []

    def export(self, chunks: Sequence[Chunk]) -> None:
        """No pages were taken."""

    def forget(self, keys: list[bytes]) -> None:
        """No pages have left."""

    def settle(self, deltas: list[TextDelta]) -> list[TextDelta]:
        """The deltas as they are."""
        return deltas

    def clear(self) -> None:
        """No request is known."""
