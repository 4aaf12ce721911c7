"""What `--pooler-config` changes of how a model pools. Imports no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxllm.config import ConfigError
from jaxllm.pooling import ALL, Pooling

TYPES = {"CLS": "cls", "LAST": "last", "MEAN": "mean", "ALL": ALL}
OF_TOKENS = "token_"  # begins the names of tasks that give every token a result


def as_wished(own: Pooling, wish: Mapping[str, Any], width: int) -> Pooling:
    """How a model of this width pools when it would pool as `own`. Raises ConfigError when it
    cannot do what is wished."""
    task, mode = _read(own, wish)
    if mode is None:
        modes = own.modes
    else:
        modes = (mode,)
    if task.startswith(OF_TOKENS) != (modes == (ALL,)):
        raise _refused(
            f"the task {task} does not go with the pooling type {modes[0].upper()}; "
            "leave pooling_type out, or name another"
        )
    given = width * len(modes)
    if own.maps and own.maps[0].inputs != given:
        raise _refused(
            f"the checkpoint's first map takes {own.maps[0].inputs} numbers, and a pool of "
            f"{modes[0].upper()} gives {given}; leave it out"
        )
    if own.maps or own.token_logits:
        size = own.size
    else:
        size = given
    return replace(own, task=task, modes=modes, size=size)


def _read(own: Pooling, wish: Mapping[str, Any]) -> tuple[str, str | None]:
    """The task, and the mode in place of the model's own."""
    if unknown := wish.keys() - {"task", "pooling_type"}:
        raise _refused(f"{min(unknown)!r:.80} is not supported; task and pooling_type are")
    kind = wish.get("pooling_type")
    if kind not in (None, *TYPES):
        raise _refused(f"pooling_type must be one of {', '.join(TYPES)}, got {kind!r:.80}")
    whole = own.task.removeprefix(OF_TOKENS)
    if kind is None:
        usual = own.task
    elif kind == "ALL":
        usual = OF_TOKENS + whole
    else:
        usual = whole
    task = wish.get("task") or usual
    if task not in (whole, OF_TOKENS + whole):
        raise _refused(f"task must be {whole} or {OF_TOKENS}{whole} here, got {task!r:.80}")
    mode = None
    if kind is not None:
        mode = TYPES[kind]
    return task, ALL if mode is None and task.startswith(OF_TOKENS) else mode


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"--pooler-config: {reason}")
