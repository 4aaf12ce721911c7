"""Counts an engine's XLA compilations, so that one while serving is seen."""

from __future__ import annotations

import functools
import threading

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"
_COUNTED = {COMPILE_EVENT: "compiles", CACHE_HIT_EVENT: "cache_hits"}


class _Entered(threading.local):
    """The counters that this thread has entered, innermost last."""

    def __init__(self) -> None:
        self.counters: list[CompileCounter] = []


_entered = _Entered()


class CompileCounter:
    """Counts compilations and hits of the persistent cache in threads that have entered it.

    JAX reports both in the thread that compiles, and not for whom. So an engine enters its counter
    around each compilation of a program and around each step.

    Attributes:
        late: programs that were left for later and are made, and those that are not yet.
    """

    def __init__(self) -> None:
        self.compiles = 0
        self.cache_hits = 0
        self.late = (0, 0)
        self._base = 0
        self._lock = threading.Lock()
        _listen()

    def __enter__(self) -> CompileCounter:
        _entered.counters.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _entered.counters.pop()

    @property
    def since_start(self) -> int:
        """Compilations since `warmed_up`."""
        return self.compiles - self._base

    def leave_late(self, programs: int) -> None:
        """So many programs are left for later."""
        self.late = (0, programs)

    def made_late(self) -> None:
        """One of them is made."""
        with self._lock:
            made, missing = self.late
            self.late = (made + 1, missing - 1)

    def warmed_up(self) -> None:
        """From here on a compilation is a fault."""
        self._base = self.compiles


@functools.cache
def _listen() -> None:
    """Listen to JAX, once in a process: listeners cannot be removed."""
    jax.monitoring.register_event_duration_secs_listener(_on_event)
    jax.monitoring.register_event_listener(_on_event)


def _on_event(event: str, *_: float, **__: object) -> None:
    """Count an event for the innermost counter of this thread. JAX gives durations to some."""
    name = _COUNTED.get(event)
    if name is not None and _entered.counters:
        counter = _entered.counters[-1]
        with counter._lock:
            setattr(counter, name, getattr(counter, name) + 1)
