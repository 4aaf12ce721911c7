"""The life of engine processes: start, restart after a death, stop."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time

from jaxllm.server.engine.client import EngineClient
from jaxllm.server.engine.connection import WORDLESS, EngineDied, launch, way_of_ending
from jaxllm.server.engine.progress import said
from jaxllm.server.engine.wire import Died

STATUS_SECONDS = 1.0  # for a process that has said nothing to show how it ended
STOP_SECONDS = 10.0  # until a process that was told to end is killed
FIRST_DELAY = 0.5  # seconds before the first restart; doubles with each in a row
MAX_DELAY = 30.0
STABLE_SECONDS = 600.0  # a process that served this long starts a new row of restarts

logger = logging.getLogger("jaxllm.server")


class EngineSupervisor:
    """Owns the engine process behind an EngineClient. `max_restarts` bounds restarts in a row,
    `name` is the engine's in the log. With `start_title`, which begins these lines, the log is told
    how far a start is."""

    def __init__(
        self,
        client: EngineClient,
        command: tuple[str, ...],
        max_restarts: int,
        name: str = "the engine",
        start_title: str | None = None,
    ):
        self._client = client
        self._command = command
        self._max_restarts = max_restarts
        self._name = name
        self._start_title = start_title
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = 0  # in a row
        self._ready_at = 0.0  # time.monotonic

    async def start(self) -> None:
        """Start a process and wait until it takes requests. Raises EngineDied."""
        self._process, sock = launch(self._command)
        logger.info("loading the model in engine process %d", self._process.pid)
        client = self._client
        try:
            async with said(self._start_title, lambda: client.progress.text):
                await client.connect(sock, self._process.pid)
        except EngineDied as error:
            raise EngineDied(Died(await self._reason(error.died), error.died.expected)) from None
        self._ready_at = time.monotonic()

    async def keep_alive(self, model: str) -> None:
        """Replace the process whenever it dies, until no restart is left."""
        while True:
            await asyncio.wait((self._client.died,))
            reason = await self._reason(self._client.died.result())
            logger.error("%s process of %s died: %s", self._name, model, reason)
            if not await self.restart():
                return

    async def _reason(self, died: Died) -> str:
        """Why the process has ended: what it said, else what its status tells."""
        if died.reason != WORDLESS or self._process is None:
            return died.reason
        try:
            status = await asyncio.to_thread(self._process.wait, STATUS_SECONDS)
        except subprocess.TimeoutExpired:
            return died.reason
        return f"the engine process {way_of_ending(status)}"

    async def restart(self) -> bool:
        """Replace a dead process; returns False when no restart is left."""
        if time.monotonic() - self._ready_at > STABLE_SECONDS:
            self._restarts = 0
        while self._restarts < self._max_restarts:
            self._client.restarting = True
            delay = min(FIRST_DELAY * 2**self._restarts, MAX_DELAY)
            self._restarts += 1
            try:
                await self.stop(now=True)
                await asyncio.sleep(delay)
                self._client.observer.engine_restarted()
                await self.start()
                logger.warning("%s serves again after restart %d", self._name, self._restarts)
                return True
            except EngineDied as error:
                logger.error("restart %d of %s failed: %s", self._restarts, self._name, error)
            finally:
                self._client.restarting = False
        self._client.given_up = True
        logger.error("%s is not restarted again (--max-engine-restarts)", self._name)
        return False

    async def stop(self, now: bool) -> None:
        """End the process: ask, then kill; with `now`, or when it is dead already, kill."""
        process = self._process
        if process is None:
            return
        now = now or not self._client.alive
        self._client.stop()
        if now:
            process.kill()
        try:
            await asyncio.to_thread(process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
