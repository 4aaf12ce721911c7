"""From a configuration to the engine of its model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.join import joined
from jaxllm.engine.pooling_engine import PoolingEngine
from jaxllm.engine.runtime.pipeline.follower import StageFollower
from jaxllm.engine.runtime.runner import Runner
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.startup.make_scheduler import make_scheduler, scheduler_class
from jaxllm.engine.startup.report import Report
from jaxllm.engine.startup.started import Started, start
from jaxllm.engine.transfer.transfer import Endpoint, PageTransfer
from jaxllm.kv_events.publisher import Publisher
from jaxllm.kv_events.settings import KVEventSettings
from jaxllm.sampling.processor_arguments import Function


def load_engine(
    config: EngineConfig,
    report: Report | None = None,
    logits_processors: Sequence[Function] = (),
    leave_late: bool = False,
) -> Engine | PoolingEngine:
    """Load, compile and warm up; the checkpoint and `config.runner` decide which engine it is.

    `sampling.processors` says what `logits_processors` are. With `leave_late` the caller makes the
    programs that `start` leaves, by `Engine.make_late`. Raises ConfigError before loading when the
    configuration cannot work.
    """
    scheduler_type = scheduler_class(config.scheduler_cls)
    with ExitStack() as stack:
        publisher = open_publisher(config)
        if publisher is not None:
            stack.callback(publisher.close)  # when loading fails
        endpoint = Endpoint.open(config)
        if endpoint is not None:
            stack.callback(endpoint.close)
        hosts = stack.enter_context(joined(config))
        parts = start(config, report or Report(), logits_processors, hosts, leave_late)
        assert not isinstance(parts.runner, StageFollower), "a host that follows has no engine"
        scheduler = make_scheduler(scheduler_type, config, parts.resolved, parts.runner)
        if publisher is not None:
            publish(scheduler, publisher)
        transfer = open_transfer(endpoint, parts, scheduler)
        if transfer is not None:
            stack.callback(transfer.close)
            parts = replace(parts, resolved=replace(parts.resolved, page_offer=transfer.offer))
        engine = (
            Engine(parts, scheduler, config.seed, transfer)
            if parts.resolved.pooling is None
            else PoolingEngine(parts, scheduler)
        )
        if publisher is not None:
            weakref.finalize(engine, publisher.close)
        if transfer is not None:
            weakref.finalize(engine, transfer.close)
        stack.pop_all()
    return engine


def open_transfer(
    endpoint: Endpoint | None, parts: Started, scheduler: Scheduler
) -> PageTransfer | None:
    """What exchanges pages with other engines, if that is wanted. Raises ConfigError."""
    if endpoint is None:
        return None
    if not isinstance(parts.runner, Runner):
        raise ConfigError(
            "--kv-transfer-config: this model pools and has no pages to continue from; leave it out"
        )
    return PageTransfer(endpoint, parts.runner, scheduler)


def open_publisher(config: EngineConfig) -> Publisher | None:
    """What publishes events of the prefix cache, if that is wanted. Raises ConfigError."""
    settings = KVEventSettings.read(config.kv_events_config)
    if settings is None or settings.publisher == "null":
        return None
    if not config.enable_prefix_caching:
        raise ConfigError(
            "--kv-events-config tells what the prefix cache holds, but prefix caching is off; "
            "leave one of them out"
        )
    return Publisher(settings)


def publish(scheduler: Scheduler, publisher: Publisher) -> None:
    """Publish what requests of the scheduler leave in the cache, and first that it is empty: who
    has listened to an engine before this one at the same address must forget. Raises ConfigError
    when nothing can be cached."""
    try:
        scheduler.kv_manager.listen(publisher.publish)
        scheduler.kv_manager.forget_prefixes()
    except ValueError:
        raise ConfigError(
            "--kv-events-config: this model computes whole prompts and caches no prefix; "
            "leave it out"
        ) from None
