"""From a configuration to the engine of its model."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.config import EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.pooling_engine import PoolingEngine
from jaxllm.engine.startup.make_scheduler import make_scheduler, scheduler_class
from jaxllm.engine.startup.report import Report
from jaxllm.engine.startup.start import start
from jaxllm.sampling.processor_arguments import Function


def load_engine(
    config: EngineConfig,
    report: Report | None = None,
    logits_processors: Sequence[Function] = (),
) -> Engine | PoolingEngine:
    """Load, compile and warm up; the checkpoint and `config.runner` decide which engine it is.

    `sampling.processors` says what `logits_processors` are. Raises ConfigError before loading when
    the configuration cannot work.
    """
    scheduler_type = scheduler_class(config.scheduler_cls)
    parts = start(config, report or Report(), logits_processors)
    scheduler = make_scheduler(scheduler_type, config, parts.resolved, parts.runner)
    if parts.resolved.pooling is not None:
        return PoolingEngine(parts, scheduler)
    return Engine(parts, scheduler, config.seed)
