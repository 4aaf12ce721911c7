"""A scheduler of the operator's own."""

from __future__ import annotations

import importlib

from jaxllm.config import ConfigError
from jaxllm.engine.scheduler import Scheduler


def scheduler_class(name: str | None) -> type[Scheduler]:
    """The class that `--scheduler-cls module:Class` names, a subclass of `Scheduler`; by default that one. Raises ConfigError."""
    if name is None:
        return Scheduler
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--scheduler-cls {name:.80} cannot be loaded: {error}; name it as module:Class") from None
    if not (isinstance(found, type) and issubclass(found, Scheduler)):
        raise ConfigError(f"--scheduler-cls {name:.80} must be a subclass of jaxllm.engine.scheduler.Scheduler")
    return found
