"""What makes the engine of an engine process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxllm.config import EngineConfig

if TYPE_CHECKING:  # tests have another
    from jaxllm.engine.engine import Engine
    from jaxllm.engine.pooling_engine import PoolingEngine
    from jaxllm.engine.startup.report import Report

type PhaseHeard = Callable[..., None]  # takes the members of `wire.Phase`
type AnyEngine = Engine | PoolingEngine
# Makes the engine; on a host that follows another, None after all has been done
type Factory = Callable[[EngineConfig, PhaseHeard], AnyEngine | None]

TOLD_SECONDS = 0.2  # between two messages about the progress of a phase


def load(config: EngineConfig, on_phase: PhaseHeard) -> AnyEngine | None:
    """The real engine; its progress goes to stderr and to the HTTP process."""
    from jaxllm.engine.startup.report import ConsoleReport

    return lead_or_follow(config, heard(ConsoleReport, on_phase))


def load_in_lines(config: EngineConfig, on_phase: PhaseHeard) -> AnyEngine | None:
    """`load` whose progress is log lines."""
    from jaxllm.engine.startup.report import LogReport

    return lead_or_follow(config, heard(LogReport, on_phase))


def heard(shown: type[Report], on_phase: PhaseHeard) -> Report:
    """A report that tells `on_phase`, too, how far each phase is."""

    class Heard(shown):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            self._told: dict[str, float] = {}  # when each phase was told of last

        def phase_moved(self, name: str, done: int, total: int) -> None:
            now = time.monotonic()
            if done == total or now - self._told.get(name, -TOLD_SECONDS) >= TOLD_SECONDS:
                self._told[name] = now
                on_phase(name, None, done, total)

        def phase_finished(self, name: str, seconds: float) -> None:
            super().phase_finished(name, seconds)
            on_phase(name, seconds)

    report: Report = Heard()
    return report


def lead_or_follow(config: EngineConfig, report: Report) -> AnyEngine | None:
    """The engine; on a host that follows another, None once that has stopped."""
    from jaxllm.engine.follow import follow
    from jaxllm.engine.load import load_engine

    if config.node_rank == 0:
        return load_engine(config, report, leave_late=True)
    follow(config, report)
    return None
