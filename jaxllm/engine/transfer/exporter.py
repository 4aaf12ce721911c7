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
from jaxllm.engine.scheduling.prefix_lookup import PrefixLookup
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.kv_transfer.cores import CORES
from jaxllm.kv_transfer.shelf import Shelf
from jaxllm.messages import TextDelta

logger = logging.getLogger("jaxllm")

type _Taken = tuple[list[bytes], Sequence[Page]]


class PageExporter:
    """`PageExports` onto a shelf: the engine's thread takes pages out of the pool when a step is
    launched, and threads of its own put them there when it was collected and they have arrived in
    host memory.

    `early`: a request that asks for nothing else is answered when its prompt begins to be computed,
    so that its pages travel meanwhile. Sequences have at most `max_model_len` tokens.

    Attributes:
        shelf: where other engines find the pages.
    """

    def __init__(
        self,
        runner: Runner,
        shelf: Shelf,
        prefixes: PrefixLookup,
        early: bool,
        max_model_len: int,
    ):
        self._runner = runner
        self.shelf = shelf
        self._prefixes = prefixes
        self._early = early
        self._max_model_len = max_model_len
        self._announced: dict[Request, list[bytes]] = {}
        # Ids of requests that get their answer in this step, and of those that had it before
        self._begun: set[str] = set()
        self._answered: set[str] = set()
        self._taken: dict[tuple[Request, int], _Taken] = {}
        self._work: queue.SimpleQueue[_Taken | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="kv-shelf", daemon=True).start()

    def announce(self, request: Request) -> None:
        """Let other engines wait for the pages of a new request's prompt."""
        self._prefixes.hash_pages(request, len(request.prompt.tokens))
        keys = self._shared(request, len(request.prompt.tokens))
        self._announced[request] = keys
        self.shelf.announce(keys)

    def answers(self, chunks: Sequence[Chunk]) -> list[Request]:
        """Requests of a launched step that get an answer now, before they have a token."""
        if not self._early:
            return []
        done = self._begun | self._answered
        found = [
            chunk.request
            for chunk in chunks
            if chunk.request.id not in done and wants_pages(chunk.request, self._max_model_len)
        ]
        self._begun.update(request.id for request in found)
        return found

    def settle(self, deltas: list[TextDelta]) -> list[TextDelta]:
        """The deltas of a step without what follows an answer. Lets nobody wait for pages of
        requests that have ended."""
        kept = []
        for delta in deltas:
            if delta.id in self._begun:
                self._begun.remove(delta.id)
                self._answered.add(delta.id)
            elif delta.id in self._answered:
                continue
            kept.append(delta)
        for request in [r for r in self._announced if r.status is Status.FINISHED]:
            self.shelf.withdraw(self._announced.pop(request))
            self._answered.discard(request.id)
        return kept

    def take(self, chunks: Sequence[Chunk]) -> None:
        """Take the pages that a step completes, which was just launched, out of the pool, those
        that are not on the shelf yet: they leave the device while the next step runs. Those of a
        request that has ended since are no longer its own."""
        for chunk in chunks:
            request = chunk.request
            if request.shares_pages and request.status is Status.RUNNING:
                keys = self._shared(request, min(chunk.end, len(request.prompt.tokens)))
                if missing := self.shelf.expect(keys):
                    wanted = [keys[at] for at in missing]
                    pages = self._taken_out(wanted, [request.pages[at] for at in missing])
                    self._taken[request, chunk.end] = wanted, pages

    def export(self, chunks: Sequence[Chunk]) -> None:
        """Let the shelf have the pages of a collected step."""
        for chunk in chunks:
            if (work := self._taken.pop((chunk.request, chunk.end), None)) is not None:
                self._work.put(work)

    def clear(self) -> None:
        """Forget all requests, and what is not on its way to the shelf."""
        for keys, _ in self._taken.values():
            self.shelf.forget(keys)
        for keys in self._announced.values():
            self.shelf.withdraw(keys)
        for kept in (self._taken, self._announced, self._begun, self._answered):
            kept.clear()

    def _taken_out(self, keys: list[bytes], pages: list[int]) -> Sequence[Page]:
        try:
            return self._runner.take_out(pages)
        except BaseException:
            self.shelf.forget(keys)  # or nobody would bring them any more
            raise

    def _shared(self, request: Request, tokens: int) -> list[bytes]:
        """Hashes of the whole pages of so many tokens."""
        count = tokens // self._prefixes.page_size
        # Last pages of a longer prompt would drive out the first, without which they are useless
        return request.hashes[: min(count, self.shelf.capacity)]

    def forget(self, keys: list[bytes]) -> None:
        """Drop pages whose contents cannot be trusted."""
        self._work.put((list(keys), ()))

    def close(self) -> None:
        """End the thread."""
        self._work.put(None)

    def _run(self) -> None:
        with ThreadPoolExecutor(CORES, thread_name_prefix="kv-copy") as pool:
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
            self.shelf.forget(keys)
        return True

    def _put(self, key: bytes, page: Page) -> None:
        self.shelf.put(key, [view(array) for array in page])


def wants_pages(request: Request, max_model_len: int) -> bool:
    """Whether a request is the first leg of one that another engine continues, which computes the
    only token once more. Where the context has no place for a second token, the wish may have been
    for all that it holds."""
    first = request.params
    return (
        request.shares_pages
        and first.max_tokens == 1
        and len(request.prompt.tokens) + 1 < max_model_len
        and first.samples == 1
        and first.logprobs is None
        and first.prompt_logprobs is None
        and not request.is_beam
    )
