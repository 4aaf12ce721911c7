"""Counts compilations, so that one while serving is seen."""

from __future__ import annotations

import threading

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"


class CompileCounter:
    """Counts this process's XLA compilations and persistent-cache hits through JAX's monitoring
    events. Another engine in the same process counts too: a serving process holds one."""

    def __init__(self) -> None:
        self.compiles = 0
        self.cache_hits = 0
        self._base = 0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    @property
    def since_start(self) -> int:
        """Compilations since `warmed_up`."""
        return self.compiles - self._base

    def warmed_up(self) -> None:
        """From here on a compilation is a fault."""
        self._base = self.compiles

    def _on_duration(self, event: str, _: float, **__: object) -> None:
        if event == COMPILE_EVENT:
            with self._lock:
                self.compiles += 1

    def _on_event(self, event: str, **_: object) -> None:
        if event == CACHE_HIT_EVENT:
            with self._lock:
                self.cache_hits += 1
