"""Output whose reader leaves, as `| head` does."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable


def while_read(work: Callable[[], int]) -> int:
    """Do `work` and return its exit status: SIGPIPE's, as of other tools, if what it prints is
    read no more."""
    try:
        try:
            return work()
        finally:
            if sys.stdout is not None:  # as it is where the shell closed it
                sys.stdout.flush()
    except BrokenPipeError:
        if not unread():
            raise
        return 128 + signal.SIGPIPE


def unread() -> bool:
    """Whether nobody reads what is printed. Then the rest of it goes nowhere."""
    poll = select.poll()
    poll.register(sys.stdout, select.POLLOUT)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return True
