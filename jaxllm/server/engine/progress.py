"""How far the start of an engine process is, in words for its operator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

from jaxllm.server.engine.wire import Phase
from jaxllm.units import amount

SAID_SECONDS = 10.0  # between two lines about a start
LINE = "%s: %s, %.0f s so far"
BEGUN = "starting the engine process"

logger = logging.getLogger("jaxllm.server")


class StartProgress:
    """The phases of one start, as the engine process tells them."""

    def __init__(self) -> None:
        self._text = BEGUN
        self._running: dict[str, str] = {}  # phase -> how far it is, in the order of their begins

    def hear(self, phase: Phase) -> None:
        """Note a phase that begins, goes on or has ended."""
        if phase.seconds is None:
            self._running[phase.name] = described(phase)
            self._text = ", ".join(self._running.values())
        elif self._running.pop(phase.name, None) is not None and self._running:
            self._text = ", ".join(self._running.values())

    @property
    def running(self) -> bool:
        """Whether a phase has begun and not ended."""
        return bool(self._running)

    @property
    def text(self) -> str:
        """The phases that run; between two phases, the one that has ended last."""
        return self._text


def described(phase: Phase) -> str:
    """How far a phase is, as "compiled 12 of 36 programs"."""
    if not phase.total:
        return phase.name[:1].lower() + phase.name[1:]
    if phase.name == "Compiling":
        return f"compiled {phase.done} of {phase.total} programs"
    if phase.name == "Loading weights":
        return f"loaded {amount(phase.done)} of {amount(phase.total)} of weights"
    return f"{phase.name[:1].lower()}{phase.name[1:]}, {phase.done} of {phase.total}"


@contextlib.asynccontextmanager
async def said(title: str | None, progress: Callable[[], str]) -> AsyncIterator[None]:
    """Log how far a start is, every SAID_SECONDS, until it has ended; nothing without a title."""

    async def say() -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(SAID_SECONDS)
            logger.info(LINE, title, progress(), time.monotonic() - began)

    if title is None:
        yield
        return
    saying = asyncio.ensure_future(say())
    try:
        yield
    finally:
        saying.cancel()
