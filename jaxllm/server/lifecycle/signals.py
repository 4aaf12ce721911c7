"""SIGTERM and SIGINT: counted while the server serves, fatal while a library may not return."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Futures of the first and of the second SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.first: asyncio.Future[int] = self._loop.create_future()
        self.second: asyncio.Future[int] = self._loop.create_future()
        self.count()

    def count(self, _: object = None) -> None:
        """Resolve the futures from now on; also a callback of whatever has ended."""
        for number in NUMBERS:
            self._loop.add_signal_handler(number, self._received, number)

    def end_process(self) -> None:
        """Let a signal end this process at once until `count`, also while a native call holds
        Python's lock."""
        for number in NUMBERS:
            self._loop.remove_signal_handler(number)
            end_on(number, first_process=os.getpid() == 1)

    def _received(self, number: int) -> None:
        future = self.second if self.first.done() else self.first
        if not future.done():
            future.set_result(number)


def end_on(number: int, first_process: bool) -> None:
    """Have a signal end this process without Python's help.

    The first process of a container ignores signals in their default state: there, the handler is
    C's `_exit`, and the exit status is the signal's number.
    """
    signal.signal(number, signal.SIG_DFL)
    if first_process:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(number, ctypes.cast(libc._exit, ctypes.c_void_p))
