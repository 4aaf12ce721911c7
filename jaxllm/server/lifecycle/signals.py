"""SIGTERM, SIGINT and SIGHUP: counted while the server serves, fatal while a library may not
return."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal


def stopping_signals() -> tuple[signal.Signals, ...]:
    """The signals on which this process stops. The end of a terminal sends SIGHUP, which is left
    alone where it was inherited as ignored: so `nohup` asks to run on."""
    always = (signal.SIGTERM, signal.SIGINT)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return always
    return (*always, signal.SIGHUP)


def repeats(number: int) -> bool:
    """Whether a signal only says again what an earlier one has said. When a terminal goes, its
    kernel and its shell both send SIGHUP, and service managers send it after SIGTERM: it is
    nobody's second word."""
    return number == signal.SIGHUP


class Signals:
    """Futures of the first and of the second of the signals on which the server stops."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._numbers = stopping_signals()
        self.first: asyncio.Future[int] = self._loop.create_future()
        self.second: asyncio.Future[int] = self._loop.create_future()
        self.count()

    def count(self, _: object = None) -> None:
        """Resolve the futures from now on; also a callback of whatever has ended."""
        for number in self._numbers:
            self._loop.add_signal_handler(number, self._received, number)

    def end_process(self) -> None:
        """Let a signal end this process at once until `count`, also while a native call holds
        Python's lock."""
        for number in self._numbers:
            self._loop.remove_signal_handler(number)
            end_on(number, first_process=os.getpid() == 1)

    def _received(self, number: int) -> None:
        if not self.first.done():
            self.first.set_result(number)
        elif not self.second.done() and not repeats(number):
            self.second.set_result(number)


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
