"""What `--pooler-config` changes of how a model pools. Imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.pooling import ALL, Pooling

TYPES = {"CLS": "cls", "LAST": "last", "MEAN": "mean", "ALL": ALL}
OF_TOKENS = "token_"  # begins the names of tasks that give every token a result


def as_wished(pooling: Pooling, wish: Mapping[str, Any], width: int) -> Pooling:
    """How a model of this width pools when it would pool as `pooling`. Raises ConfigError when it
    cannot do what is wished."""
    task, mode = _read(pooling, wish)
    if mode is None:
        modes = pooling.modes
    else:
        modes = (mode,)
    if task.startswith(OF_TOKENS) != (modes == (ALL,)):
        raise _refused(
            f"the task {task} does not go with the pooling type {modes[0].upper()}; "
            "leave pooling_type out, or name another"
        )
    pool_width = width * len(modes)
    if pooling.maps and pooling.maps[0].inputs != pool_width:
        raise _refused(
            f"the checkpoint's first map takes {pooling.maps[0].inputs} numbers, and a pool of "
            f"{modes[0].upper()} gives {pool_width}; leave it out"
        )
    if pooling.maps or pooling.token_logits:
        size = pooling.size
    else:
        size = pool_width
    return replace(pooling, task=task, modes=modes, size=size)


def _read(pooling: Pooling, wish: Mapping[str, Any]) -> tuple[str, str | None]:
    """The task, and the mode in place of the model's own."""
    if unknown := wish.keys() - {"task", "pooling_type"}:
        raise _refused(f"{min(unknown)!r:.80} is not supported; task and pooling_type are")
    pooling_type = wish.get("pooling_type")
    if pooling_type not in (None, *TYPES):
        raise _refused(f"pooling_type must be one of {', '.join(TYPES)}, got {pooling_type!r:.80}")
    whole = pooling.task.removeprefix(OF_TOKENS)
    if pooling_type is None:
        usual = pooling.task
    elif pooling_type == "ALL":
        usual = OF_TOKENS + whole
    else:
        usual = whole
    task = wish.get("task") or usual
    if task not in (whole, OF_TOKENS + whole):
        raise _refused(f"task must be {whole} or {OF_TOKENS}{whole} here, got {task!r:.80}")
    if pooling_type is not None:
        return task, TYPES[pooling_type]
    if task.startswith(OF_TOKENS):
        return task, ALL
    return task, None


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"--pooler-config: {reason}")
