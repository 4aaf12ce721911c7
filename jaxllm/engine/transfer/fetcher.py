"""Pages that come from other engines, for requests that wait for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from jaxllm.cache.transfer import Page, page_shapes
from jaxllm.engine.runtime.page_swapper import far_memory
from jaxllm.engine.runtime.program import shardings
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.kv_transfer.client import Address, PageClient
from jaxllm.kv_transfer.pages import PageLayout
from jaxllm.kv_transfer.together import TogetherClient

THREADS = 4  # fetches at once

logger = logging.getLogger("jaxllm")


class _Fetch(NamedTuple):
    """What a request lacks, on its way; its choices wait, and pages of host memory for it. Behind
    it comes their grammar, if they have one."""

    choices: Sequence[Request]
    grammar: str | None
    keys: list[bytes]
    places: list[int]
    pages: Future[list[Page]]

    @property
    def is_wanted(self) -> bool:
        """Whether the request still waits."""
        return still_waits(self.choices)


class PageFetcher:
    """Brings pages into host memory, in threads of its own. A request waits at most `seconds`: it
    computes what has not come by then.

    Attributes:
        on_arrived: called, in any thread, when the pages of a request have come or will not.
    """

    def __init__(
        self,
        client: PageClient,
        runner: Runner,
        scheduler: Scheduler,
        layout: PageLayout,
        seconds: float,
    ):
        self._client = TogetherClient(client, THREADS)
        self._runner, self._scheduler = runner, scheduler
        self._layout, self._seconds = layout, seconds
        shapes = runner.shapes
        self._far = shardings(page_shapes(shapes.kv, far_memory(shapes.platform)))
        self._aliases = shapes.platform == "cpu"
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kv-fetch")
        self._fetches: list[_Fetch] = []
        self.on_arrived: Callable[[], None] = lambda: None

    @property
    def pending(self) -> list[Future[list[Page]]]:
        """The fetches that have not been popped."""
        return [fetch.pages for fetch in self._fetches]

    @property
    def waiting(self) -> int:
        """How many choices wait for pages."""
        return sum(
            choice.status is not Status.FINISHED
            for fetch in self._fetches
            for choice in fetch.choices
        )

    def start(self, choices: Sequence[Request], grammar: str | None, address: Address) -> bool:
        """Fetch what the first choice of a new request lacks and host memory has room for; False
        where that is nothing."""
        # An idle engine takes no step that would do it
        self._pop(lambda fetch: fetch.pages.done() and not fetch.is_wanted)
        offload, swapper = self._scheduler.offload, self._runner.swapper
        assert offload is not None and swapper is not None, "refused by Endpoint.open"
        keys = self._scheduler.kv_manager.lacking(choices[0])
        # The room is there before the pages are: more memory would have to be pinned first, which
        # takes seconds
        places = offload.host.reserve(len(keys), {*choices[0].hashes} - {*keys})
        swapper.drop(places)
        if keys := keys[: len(places)]:
            until = time.monotonic() + self._seconds
            pages = self._threads.submit(self._fetch, choices, address, keys, until)
            self._fetches.append(_Fetch(choices, grammar, keys, places, pages))
            pages.add_done_callback(lambda _: self.on_arrived())
        return bool(keys)

    def pop_arrived(self) -> list[tuple[Sequence[Request], str | None]]:
        """The choices of requests whose fetch has ended, in their order, with their grammars; host
        memory now has what came and keeps it for them."""
        done = self._pop(lambda fetch: fetch.pages.done())
        return [(fetch.choices, fetch.grammar) for fetch in done]

    def clear(self) -> None:
        """Forget all requests; what is still on its way for them is dropped."""
        self._fetches = []

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _pop(self, which: Callable[[_Fetch], bool]) -> list[_Fetch]:
        """Take out fetches that have ended, and give back their room; what came is stored where it
        is still wanted."""
        ended, left = list[_Fetch](), list[_Fetch]()
        for fetch in self._fetches:  # each is asked once: it may end at any time
            (ended if which(fetch) else left).append(fetch)
        self._fetches = left
        offload = self._scheduler.offload
        assert offload is not None, "refused by Endpoint.open"
        for fetch in ended:
            offload.host.release(fetch.places)
            if fetch.is_wanted:
                self._store(fetch)
        return ended

    def _fetch(
        self, choices: Sequence[Request], address: Address, keys: list[bytes], until: float
    ) -> list[Page]:
        if not still_waits(choices):  # aborted while others were fetched
            return []
        left = until - time.monotonic()
        found = self._client.fetch(address, keys, left, self._keep, jax.errors.JaxRuntimeError)
        if found.error is not None:
            missing = len(keys) - len(found.pages)
            logger.warning("%d KV pages are computed, not fetched: %s", missing, found.error)
        return found.pages

    def _keep(self, page: np.ndarray) -> Page:
        """A page in host memory."""
        # The client uses the memory again, and a CPU's arrays may lie in what they are of
        arrays = self._layout.split(page.copy() if self._aliases else page)
        return jax.block_until_ready(jax.device_put(arrays, self._far))

    def _store(self, fetch: _Fetch) -> None:
        """Put fetched pages into host memory, pinned until their request runs."""
        offload, swapper = self._scheduler.offload, self._runner.swapper
        assert offload is not None and swapper is not None, "refused by Endpoint.open"
        pages = fetch.pages.result()
        keys = fetch.keys[: len(pages)]
        if keys:
            self._scheduler.kv_manager.pin(fetch.choices[0], keys)
        for key, page in zip(keys, pages, strict=True):
            if (place := offload.host.save(key)) is not None:
                swapper.keep(place, page)


def still_waits(choices: Sequence[Request]) -> bool:
    """Whether a request waits for its pages: it may have been aborted."""
    return choices[0].status is not Status.FINISHED
