"""Pages that leave for other engines."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from jaxllm.cache.transfer import Page
from jaxllm.engine.runtime.launch import view
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.scheduling.plan import Chunk
from jaxllm.engine.scheduling.request import Status
from jaxllm.kv_transfer.shelf import Shelf
from jaxllm.kv_transfer.together import CONNECTIONS

logger = logging.getLogger("jaxllm")

type _Work = tuple[list[bytes], Sequence[Page]] | None


class PageExporter:
    """Copies pages to a shelf: the engine's thread takes them out of the pool, threads of its own
    put them there when they have arrived in host memory."""

    def __init__(self, runner: Runner, shelf: Shelf, page_size: int):
        self._runner, self._shelf, self._page_size = runner, shelf, page_size
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="kv-shelf", daemon=True).start()

    def export(self, chunks: Sequence[Chunk]) -> None:
        """Copy what a collected step has computed of prompts whose pages are shared."""
        for chunk in chunks:
            if chunk.request.shares_pages:
                self._export(chunk)

    def _export(self, chunk: Chunk) -> None:
        """Copy the pages of a request up to a chunk, those that are not on the shelf yet.

        Steps after that one may be in flight, but none that is launched later is older than the
        copy. A request that was preempted since has other pages: those that later steps have
        written count then.
        """
        request = chunk.request
        if request.status is not Status.RUNNING or request.pages_in_transit:
            return
        count = min(chunk.end, request.computed, len(request.prompt)) // self._page_size
        # Last pages of a longer prompt would drive out the first, without which they are useless
        keys = request.hashes[: min(count, self._shelf.capacity)]
        missing = self._shelf.expect(keys)
        if missing:
            wanted = [keys[at] for at in missing]
            try:
                pages = self._runner.take_out([request.pages[at] for at in missing])
            except BaseException:
                self._shelf.forget(wanted)  # or nobody would bring them any more
                raise
            self._work.put((wanted, pages))

    def forget(self, keys: list[bytes]) -> None:
        """Drop pages whose contents cannot be trusted."""
        self._work.put((list(keys), ()))

    def close(self) -> None:
        """End the thread."""
        self._work.put(None)

    def _run(self) -> None:
        # One core copies fewer bytes a second than the device's link carries
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="kv-copy") as pool:
            while self._do_next(pool):
                pass

    def _do_next(self, pool: ThreadPoolExecutor) -> bool:
        """Wait for work and do it; nothing holds its pinned memory afterwards. False at the end."""
        if (work := self._work.get()) is None:
            return False
        keys, pages = work
        copies = [pool.submit(self._put, *each) for each in zip(keys, pages, strict=False)]
        wait(copies)
        errors = [error for copy in copies if (error := copy.exception()) is not None]
        if errors:
            logger.warning("KV pages for other engines could not be copied: %s", errors[0])
        if errors or not pages:
            self._shelf.forget(keys)
        return True

    def _put(self, key: bytes, page: Page) -> None:
        self._shelf.put(key, [view(array) for array in page])
