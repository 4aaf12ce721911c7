"""Pages between two processes of this machine: GB/s through shared memory and through TCP.

    python -m benchmarks.kv_transfer --page-kib 2048 --pages 128

One process holds the pages, this one fetches all of them as an engine does, over several
connections at once, checks each and copies it into memory that is there already, as pinned memory
is. `per CPU second` is by the time that this process
computes, which a busy machine changes little; `copy` is what one core copies, for comparison. No
device takes part.
"""

from __future__ import annotations

import multiprocessing
import secrets
import time
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.record import finish, parser
from jaxllm.kv_transfer.client import PageClient
from jaxllm.kv_transfer.server import PageServer, listen
from jaxllm.kv_transfer.shelf import Shelf
from jaxllm.kv_transfer.together import TogetherClient

ROUNDS = 7
WARM = 2  # of them, which connect and touch the memory
FINGERPRINT = bytes(32)


def hashes_of(pages: int) -> list[bytes]:
    """A hash for each page."""
    return [number.to_bytes(32) for number in range(pages)]


def serve(pipe: Connection, key: bytes, pages: int, size: int, seed: int) -> None:
    """Hold random pages until the other end of the pipe says something."""
    shelf, random = Shelf(pages, size), np.random.default_rng(seed)
    for name in hashes_of(pages):
        shelf.put(name, [random.integers(0, 256, size, np.uint8)])
    server = PageServer(listen("127.0.0.1", 0), key, shelf, FINGERPRINT, size)
    pipe.send(server.port)
    pipe.recv()
    server.close()


def speeds(client: TogetherClient, port: int, pages: int, into: np.ndarray) -> np.ndarray:
    """GB a second, and a second of this process's time on a core, of each round, `[rounds, 2]`."""
    found, places = [], {key: number for number, key in enumerate(hashes_of(pages))}
    for _ in range(ROUNDS):
        begin, came = clocks(), set[bytes]()

        def keep(key: bytes, page: np.ndarray, came: set[bytes] = came) -> None:
            np.copyto(into[places[key]], page)
            came.add(key)

        error = client.fetch(("127.0.0.1", port), [*places], 60, keep)
        found.append(into.nbytes / (clocks() - begin) / 1e9)
        assert len(came) == pages, f"{len(came)} of {pages} pages came: {error}"
    return np.array(found[WARM:])


def clocks() -> np.ndarray:
    """Seconds on the wall, and of this process."""
    return np.array([time.perf_counter(), time.process_time()])


def copy_speed(into: np.ndarray) -> float:
    """GB/s of one core that copies from a page to the others."""
    begin = time.perf_counter()
    into[1:] = into[0]
    return into[1:].nbytes / (time.perf_counter() - begin) / 1e9


def main() -> None:
    """Parses the command line and prints the figures."""
    options = parser(__doc__)
    options.add_argument("--page-kib", type=int, default=2048, help="KiB of a page, all layers")
    options.add_argument("--pages", type=int, default=128, help="pages of one request")
    arguments = options.parse_args()
    size, key = arguments.page_kib << 10, secrets.token_bytes(32)
    into = np.full((arguments.pages, size), 1, np.uint8)  # touched
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    child = context.Process(
        target=serve, args=(other, key, arguments.pages, size, arguments.seed), daemon=True
    )
    child.start()
    port = pipe.recv()
    figures: dict[str, float] = {"copy": round(copy_speed(into), 2)}
    for name, shared in (("shared memory", True), ("tcp", False)):
        client = TogetherClient(PageClient(key, FINGERPRINT, size, shared), 1)
        rounds = speeds(client, port, arguments.pages, into)
        client.close()
        wall, computed = np.median(rounds, 0).round(2).tolist()
        figures |= {name: wall, f"{name}, per CPU second": computed}
    pipe.send(None)
    child.join()
    finish("kv_transfer", arguments, figures)


if __name__ == "__main__":
    main()
