"""`jaxllm check`: does a model fit this machine? Nothing is loaded or compiled."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping

from jaxllm.config import ConfigError


def check(argv: list[str], environ: Mapping[str, str]) -> int:
    """Decide as `jaxllm serve` would with these options, and print it. Returns 0 when it fits, 1
    with the reason and what helps when it does not."""
    from rich.console import Console

    from jaxllm.engine.startup.check import check_fit
    from jaxllm.engine.startup.report import ConsoleReport
    from jaxllm.server.command_line.options import parse_models
    from jaxllm.server.lifecycle.serve import find_model

    options, *others = parse_models(argv, environ, prog="jaxllm check")
    if others:
        names = ", ".join(each.config.model for each in others)
        print(
            f"jaxllm check: this is about {options.config.model} alone; check {names}, too, "
            "with its part of the device's memory (--gpu-memory-utilization)",
            file=sys.stderr,
        )
    try:
        model_dir = find_model(options)
        rows = check_fit(dataclasses.replace(options.config, model=str(model_dir)))
    except ConfigError as error:
        print(f"jaxllm check: {error}", file=sys.stderr)
        return 1
    report = ConsoleReport()
    report.console = Console(highlight=False)
    report.show_table("it fits", rows)
    return 0
