"""Fetches the pages of a request over several connections at once: one core copies far fewer bytes
a second than a device's link carries."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

import numpy as np

from jaxllm.kv_transfer.client import Address, PageClient
from jaxllm.kv_transfer.wire import TransferError

# Of one fetch, and copies to the shelf at once: a quarter of the machine's cores
CONNECTIONS = min(8, max(2, (os.cpu_count() or 1) // 4))
LEAST = 4  # pages of a connection; fewer are not worth another


class Fetched[T](NamedTuple):
    """What came of a fetch.

    Attributes:
        pages: what was kept of each page, from the first on and without a gap.
        error: why no more came, where something went wrong.
    """

    pages: list[T]
    error: Exception | None = None


class TogetherClient:
    """Fetches for `requests` requests at once. Any thread may call it."""

    def __init__(self, client: PageClient, requests: int):
        self._client = client
        self._threads = ThreadPoolExecutor(requests * CONNECTIONS, thread_name_prefix="kv-pages")

    def fetch[T](
        self,
        address: Address,
        hashes: Sequence[bytes],
        seconds: float,
        keep: Callable[[np.ndarray], T],
        errors: type[Exception] = TransferError,
    ) -> Fetched[T]:
        """Pages of the longest prefix of `hashes` that the peer has. `keep` is called in any
        thread with each page, uint8 `[page_bytes]`, which is valid until it returns; what it
        returns is kept. TransferError and `errors` of `keep` end the fetch: other connections
        then bring one more page at most."""
        until, ended = time.monotonic() + seconds, threading.Event()

        def part(some: Sequence[bytes]) -> Fetched[T]:
            pages: list[T] = []
            fetch = self._client.fetch(address, some, until - time.monotonic())
            try:
                with closing(fetch):  # now, not when nobody refers to an error's frames any more
                    for page in fetch:
                        if ended.is_set():
                            break
                        pages.append(keep(page))
            except (TransferError, errors) as error:
                return Fetched(pages, error)
            return Fetched(pages)

        parts, found = divide(hashes), list[T]()
        try:
            for some, (pages, error) in zip(parts, self._threads.map(part, parts), strict=True):
                found += pages
                if len(pages) < len(some):  # without what is missing the rest is useless
                    return Fetched(found, error)
            return Fetched(found)
        finally:
            ended.set()

    def close(self) -> None:
        """End the threads and the connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()


def divide(hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Consecutive parts of about the same length, one for each connection."""
    size = max(LEAST, -(-len(hashes) // CONNECTIONS))
    return [hashes[at : at + size] for at in range(0, len(hashes), size)]
