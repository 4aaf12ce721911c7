"""A native call that never returns, in place of a library's bug."""

from __future__ import annotations

import ctypes


def never_return(holding_the_lock: bool) -> None:
    """Wait for a mutex twice, with or without Python's lock; no signal interrupts that."""
    libc = ctypes.PyDLL(None) if holding_the_lock else ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
