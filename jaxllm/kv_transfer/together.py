"""Fetches the pages of a request over several connections at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import closing

import numpy as np

from jaxllm.background.daemons import DaemonThreads
from jaxllm.kv_transfer.client import ENDED, Address, PageClient
from jaxllm.kv_transfer.cores import CORES
from jaxllm.kv_transfer.wire import TransferError

END_SECONDS = 2.0  # for threads to end whose connections are closed
LEAST = 4  # pages of a connection; fewer are not worth another


class TogetherClient:
    """Fetches for `requests` requests at once. Any thread may call it."""

    def __init__(self, client: PageClient, requests: int):
        self._client = client
        self._threads = DaemonThreads(requests * CORES, "kv-pages")

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

        def part(share: Sequence[bytes]) -> None:
            with closing(self._client.fetch(address, share, seconds)) as pages:
                for number, page in enumerate(pages):
                    if ended.is_set():
                        break
                    keep(share[number], page)

        parts = [self._threads.submit(part, share) for share in divide(hashes)]
        try:
            done, _ = wait(parts, return_when=FIRST_EXCEPTION)
        finally:
            ended.set()
        if any(part.cancelled() for part in done):
            return TransferError(ENDED)
        for error in (part.exception() for part in done):
            if isinstance(error, (TransferError, errors)):
                return error
            if error is not None:
                raise error
        return None

    def close(self) -> None:
        """End the connections, and so the fetches, and the threads."""
        self._client.close()
        self._threads.close(END_SECONDS)


def divide(hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
    """A part for each connection, about as long as the others; pages that are computed one after
    another come by different ones."""
    parts = max(1, min(CORES, len(hashes) // LEAST))
    return [hashes[part::parts] for part in range(parts)]
