"""A server whose engine steps only with a permit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from jaxllm.server.state import Settings
from jaxllm.tokenizer import Tokenizer
from tests.server.fake import Control
from tests.server.harness import SETTINGS, Running

ENDLESS = {"model": "fake", "prompt": "abc", "ignore_eos": True, "max_tokens": 250}


class Slow(Control):
    """Lets the engine step only when told to, one permit each."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.go = Permits(self.permits)  # type: ignore[assignment]

    def step_until(self, condition: Callable[[], bool]) -> None:
        """Give permits one by one until the engine's thread has made `condition` true."""
        with self.changed:
            until = time.monotonic() + 60
            while not condition():
                assert time.monotonic() < until, "the engine never got there"
                if not self.permits._value:  # the one before has been taken
                    self.permits.release(1)
                self.changed.wait(0.02)


class Permits:
    """Takes the place of the event that steps wait for."""

    def __init__(self, permits: threading.Semaphore):
        self._permits = permits

    def wait(self) -> None:
        """One step takes one permit."""
        self._permits.acquire()

    def set(self) -> None:
        """Let everything run to its end."""
        self._permits.release(100_000)


class Stepped(Running):
    """A server whose engine steps only with a permit."""

    control: Slow

    def __init__(self, tokenizer: Tokenizer, settings: Settings = SETTINGS):
        super().__init__(tokenizer, settings)
        self.control = Slow()
