"""The scheduler's public path, for subclasses that operators bring (`--scheduler-cls`)."""

from jaxllm.engine.scheduling.scheduler import Scheduler as Scheduler
