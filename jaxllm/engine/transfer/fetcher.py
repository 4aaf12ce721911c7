"""Pages that come from other engines, for requests that wait for them."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import jax
import numpy as np

from jaxllm.background.daemons import DaemonThreads
from jaxllm.cache.transfer import Page
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.kv_transfer.client import Address, PageClient
from jaxllm.kv_transfer.pages import PageLayout
from jaxllm.kv_transfer.together import END_SECONDS, TogetherClient
from jaxllm.kv_transfer.wire import TransferError

THREADS = 8  # fetches at once
REFUSED = "refused by Endpoint.open"

logger = logging.getLogger("jaxllm")


class _Fetch(NamedTuple):
    """What a request lacks, on its way.

    Attributes:
        choices: those that wait for it, of this request and of later ones.
        places: host page of each key.
        arrived: key and page, in the order in which they come.
        ended: done when nothing comes any more.
    """

    choices: list[Request]
    places: dict[bytes, int]
    arrived: queue.SimpleQueue[tuple[bytes, Page]]
    ended: Future[None]


class PageFetcher:
    """Brings pages into host memory, in threads of its own. Host memory has promised them to their
    request, which may be scheduled at once: they go on to the device one by one. What has not come
    `seconds` after the page before it is computed.

    Attributes:
        on_arrived: called, in any thread, when a page has come or no more will.
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
        self._runner = runner
        self._scheduler = scheduler
        self._layout = layout
        self._seconds = seconds
        assert runner.swapper is not None and scheduler.offload is not None, REFUSED
        runner.swapper.prepare(scheduler.offload.host.num_pages)
        self._threads = DaemonThreads(THREADS, "kv-fetch")
        self._fetches: list[_Fetch] = []
        self.on_arrived: Callable[[], None] = lambda: None

    @property
    def pending(self) -> list[Future[None]]:
        """The fetches whose end `collect` has not seen."""
        return [fetch.ended for fetch in self._fetches]

    @property
    def has_news(self) -> bool:
        """Whether `collect` would find anything."""
        return any(fetch.ended.done() or not fetch.arrived.empty() for fetch in self._fetches)

    def start(self, choices: Sequence[Request], address: Address) -> None:
        """Fetch what a new request lacks and host memory has room for. All its choices wait for
        that."""
        self.collect()  # an idle engine takes no step that would do it
        assert self._runner.swapper is not None, REFUSED
        # The room is there before the pages are: more memory would have to be pinned first, which
        # takes seconds
        kv_manager = self._scheduler.kv_manager
        first = choices[0]
        places = kv_manager.promise(first)
        for choice in choices[1:]:
            kv_manager.pin(choice, first.pinned)
        self._runner.swapper.drop([*places.values()])
        for fetch in self._fetches:
            if not fetch.places.keys().isdisjoint(first.pinned):
                fetch.choices.extend(choices)  # it goes on when those before are aborted
        if places:
            arrived = queue.SimpleQueue[tuple[bytes, Page]]()
            waiting = [*choices]
            until = time.monotonic() + self._seconds
            ended = self._threads.submit(self._fetch, waiting, address, [*places], arrived, until)
            self._fetches.append(_Fetch(waiting, places, arrived, ended))
            ended.add_done_callback(lambda _: self.on_arrived())

    def collect(self) -> None:
        """Give host memory what has come. Requests compute what will not come any more."""
        offload = self._scheduler.offload
        swapper = self._runner.swapper
        assert offload is not None and swapper is not None, REFUSED
        for fetch in [*self._fetches]:
            ended = fetch.ended.done()  # asked first: nothing comes after it
            while not fetch.arrived.empty():
                key, page = fetch.arrived.get_nowait()
                if offload.host.arrive(key, fetch.places[key]):
                    swapper.keep(fetch.places[key], page)
                else:
                    swapper.give_back(page)
            if ended:
                self._fetches.remove(fetch)
                places = fetch.places.items()
                lost = [place for key, place in places if offload.host.is_promised(key, place)]
                self._scheduler.drop_lost(lost)

    def clear(self) -> None:
        """Forget all requests; what is still on its way for them is dropped."""
        self._fetches = []

    def close(self) -> None:
        """End the fetches and the threads, whatever they wait for."""
        self._client.close()
        self._threads.close(END_SECONDS)

    def _fetch(
        self,
        choices: Sequence[Request],
        address: Address,
        keys: list[bytes],
        arrived: queue.SimpleQueue[tuple[bytes, Page]],
        until: float,
    ) -> None:
        came = 0
        swapper = self._runner.swapper
        assert swapper is not None, REFUSED

        def keep(key: bytes, page: np.ndarray) -> None:
            nonlocal came
            if not still_waits(choices):
                raise TransferError("who wanted it was aborted")
            arrived.put((key, swapper.made(self._layout.split(page))))
            came += 1
            self.on_arrived()

        if still_waits(choices) and time.monotonic() < until:  # others came first
            try:
                error = self._client.fetch(
                    address, keys, self._seconds, keep, jax.errors.JaxRuntimeError
                )
            except Exception:  # nobody looks at what a thread raises
                logger.exception("KV pages are computed, not fetched")
                return
            if error is not None and still_waits(choices):
                logger.warning("%d KV pages are computed, not fetched: %s", len(keys) - came, error)


def still_waits(choices: Sequence[Request]) -> bool:
    """Whether one of them waits for its pages: they may have been aborted."""
    return any(choice.status is not Status.FINISHED for choice in choices)
