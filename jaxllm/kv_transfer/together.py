"""Fetches the pages of a request over several connections at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing

import numpy as np

from jaxllm.kv_transfer.client import Address, PageClient
from jaxllm.kv_transfer.cores import CORES
from jaxllm.kv_transfer.wire import TransferError

LEAST = 4  # pages of a connection; fewer are not worth another


class TogetherClient:
    """Fetches for `requests` requests at once. Any thread may call it."""

    def __init__(self, client: PageClient, requests: int):
        self._client = client
        self._threads = ThreadPoolExecutor(requests * CORES, thread_name_prefix="kv-pages")

    def fetch(
        self,
        address: Address,
        hashes: Sequence[bytes],
        seconds: float,
        keep: Callable[[bytes, np.ndarray], None],
        errors: type[Exception] = TransferError,
    ) -> Exception | None:
        """Get the pages of `hashes` that the peer has or gets. `keep` is called in any thread with
        each page's hash and bytes, uint8 `[page_bytes]`, which are valid until it returns; one page
        comes within `seconds` of that before it, or no more. Returns why not all came, if something
        went wrong: TransferError or `errors` of `keep` end the fetch, and other connections then
        bring one more page at most."""
        ended = threading.Event()

        def part(some: Sequence[bytes]) -> None:
            with closing(self._client.fetch(address, some, seconds)) as pages:
                for number, page in enumerate(pages):
                    if ended.is_set():
                        break
                    keep(some[number], page)

        parts = [self._threads.submit(part, some) for some in divide(hashes)]
        try:
            done, _ = wait(parts, return_when=FIRST_EXCEPTION)
        finally:
            ended.set()
        for error in (part.exception() for part in done):
            if isinstance(error, (TransferError, errors)):
                return error
            if error is not None:
                raise error
        return None

    def close(self) -> None:
        """End the threads and the connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()


def divide(hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
    """A part for each connection, about as long as the others; pages that are computed one after
    another come by different ones."""
    parts = max(1, min(CORES, len(hashes) // LEAST))
    return [hashes[part::parts] for part in range(parts)]
