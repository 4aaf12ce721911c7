"""An end for measurements in which a device may hang: nothing in this process can end its wait."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_within(seconds: float, what: str) -> Iterator[None]:
    """Say so and end the process, with status 1, when the block takes longer than `seconds`."""

    def lost() -> None:
        row = {"error": f"{what} did not end in {seconds:g} s: a device hangs", "ok": False}
        print(json.dumps(row), flush=True)
        os._exit(1)

    watch = threading.Timer(seconds, lost)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
