"""`jaxllm check`: does a model fit this machine? Nothing is loaded or compiled."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxllm.config import ConfigError

PROGRAM = "jaxllm check"

if TYPE_CHECKING:
    from jaxllm.server.command_line.options import Options


def check(argv: list[str], environ: Mapping[str, str]) -> int:
    """Decide as `jaxllm serve` would with these options, and print it for each model. Returns 0
    when all fit, else 1 with the reason and what helps."""
    from jaxllm.server.command_line.options import parse_models

    models = parse_models(argv, environ, prog=PROGRAM)
    if len(models) == 1:
        return _check(models[0], named=False)
    # JAX's client takes one share of a device in a process, and each model has its own
    processes = multiprocessing.get_context("spawn")
    found = []
    for at in range(len(models)):
        process = processes.Process(target=_check_entry, args=(argv, dict(environ), at))
        process.start()
        process.join()
        found.append(process.exitcode)
    return int(any(found))


def _check_entry(argv: list[str], environ: Mapping[str, str], at: int) -> None:
    """Check one of several models, and end the process with its status."""
    from jaxllm.server.command_line.options import parse_models

    raise SystemExit(_check(parse_models(argv, environ, prog=PROGRAM)[at], named=True))


def _check(options: Options, named: bool) -> int:
    """The same of one model, which is `named` where there are others."""
    from rich.console import Console

    from jaxllm.engine.startup.check import check_fit
    from jaxllm.engine.startup.report import ConsoleReport
    from jaxllm.server.lifecycle.launches import engine_launches
    from jaxllm.server.lifecycle.serve import find_model

    name = options.settings.served[0]
    try:
        engine, *_ = engine_launches(options, find_model(options))
        rows = check_fit(engine.config)
    except ConfigError as error:
        print(f"{PROGRAM}: {f'{name}: ' if named else ''}{error}", file=sys.stderr)
        return 1
    report = ConsoleReport()
    report.console = Console(highlight=False)
    report.show_table(f"{name} fits" if named else "it fits", rows)
    return 0
