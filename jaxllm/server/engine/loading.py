"""What makes the engine of an engine process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxllm.config import EngineConfig

if TYPE_CHECKING:  # tests have another
    from jaxllm.engine.engine import Engine
    from jaxllm.engine.pooling_engine import PoolingEngine
    from jaxllm.engine.startup.report import Report

type PhaseFinished = Callable[[str, float], None]  # a phase of the start, and its seconds
type AnyEngine = Engine | PoolingEngine
# Makes the engine; on a host that follows another, None after all has been done
type Factory = Callable[[EngineConfig, PhaseFinished], AnyEngine | None]


def load(config: EngineConfig, on_phase: PhaseFinished) -> AnyEngine | None:
    """The real engine; its progress goes to stderr and its phases to the HTTP process."""
    from jaxllm.engine.startup.report import ConsoleReport

    class PhaseReport(ConsoleReport):
        def phase_finished(self, name: str, seconds: float) -> None:
            super().phase_finished(name, seconds)
            on_phase(name, seconds)

    return lead_or_follow(config, PhaseReport())


def load_in_lines(config: EngineConfig, on_phase: PhaseFinished) -> AnyEngine | None:
    """`load` whose progress is log lines."""
    from jaxllm.engine.startup.report import LogReport

    class PhaseReport(LogReport):
        def phase_finished(self, name: str, seconds: float) -> None:
            super().phase_finished(name, seconds)
            on_phase(name, seconds)

    return lead_or_follow(config, PhaseReport())


def lead_or_follow(config: EngineConfig, report: Report) -> AnyEngine | None:
    """The engine; on a host that follows another, None once that has stopped."""
    from jaxllm.engine.follow import follow
    from jaxllm.engine.load import load_engine

    if config.node_rank == 0:
        return load_engine(config, report, leave_late=True)
    follow(config, report)
    return None
