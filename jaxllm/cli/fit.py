"""`jaxllm check`: does a model fit this machine? Nothing is loaded or compiled."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxllm.config import ConfigError

PROGRAM = "jaxllm check"

if TYPE_CHECKING:
    from pathlib import Path

    from jaxllm.engine.startup.report import Rows
    from jaxllm.server.command_line.options import Options
    from jaxllm.server.lifecycle.launches import Launch


def check(argv: list[str], environ: Mapping[str, str]) -> int:
    """Decide as `jaxllm serve` would with these options, and print it for each model. Returns 0
    when all fit, else 1 with the reason and what helps."""
    from jaxllm.server.command_line.options import parse_models
    from jaxllm.server.lifecycle.launches import engine_launches
    from jaxllm.server.lifecycle.serve import find_model

    # Tokenizers need no PyTorch, whose absence transformers tells
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    models = parse_models(argv, environ, prog=PROGRAM)
    failed = False
    for options in models:
        name = ""
        if len(models) > 1:
            name = options.settings.served[0]
        try:
            model_dir = find_model(options)
            launch, *_ = engine_launches(options, model_dir)
        except ConfigError as error:
            failed |= _refuse(name, error)
            continue
        if name:
            unfit = _in_process(name, launch)
        else:
            unfit = _check(name, launch)
        failed |= unfit or _check_chats(name, options, model_dir)
    return int(failed)


def _check_chats(name: str, options: Options, model_dir: Path) -> bool:
    """Print what the model's chat templates show of a history. Returns whether the model has no
    usable tokenizer."""
    from jaxllm.background.process import JobLost
    from jaxllm.server.lifecycle.served_model import load_tokenizer
    from jaxllm.server.rendering.renders import found_traits
    from jaxllm.templates.traits import table_of

    try:
        tokenizer = load_tokenizer(options, model_dir)
        if tokenizer is None or not tokenizer.has_chat_template:
            return False
        traits = found_traits(tokenizer.template_facts(), options.settings.template_kwargs)
    except (ConfigError, JobLost) as error:
        return _refuse(name, str(error))
    _show(f"{_prefix(name)}its chat template", table_of(traits))
    return False


def _in_process(name: str, launch: Launch) -> bool:
    """`_check` in a process of its own: JAX's client takes one share of a device in a process, and
    sees the same devices as long as that lives."""
    process = multiprocessing.get_context("spawn").Process(target=_check_entry, args=(name, launch))
    process.start()
    process.join()
    if process.exitcode not in (0, 1):
        _refuse(name, f"the process that checked it ended with {process.exitcode}")
    return process.exitcode != 0


def _check_entry(name: str, launch: Launch) -> None:
    raise SystemExit(int(_check(name, launch)))


def _check(name: str, launch: Launch) -> bool:
    """Print whether a model fits, which has a `name` where there are others. Returns whether it
    does not."""
    from jaxllm.server.lifecycle.launches import DEVICES

    if launch.devices is not None:
        os.environ[DEVICES] = launch.devices  # before JAX looks
    from jaxllm.engine.startup.started import check_fit

    try:
        rows = check_fit(launch.config)
    except ConfigError as error:
        return _refuse(name, error)
    _show(f"{name} fits" if name else "it fits", rows)
    return False


def _show(title: str, rows: Rows) -> None:
    from rich.console import Console

    from jaxllm.engine.startup.report import ConsoleReport

    report = ConsoleReport()
    report.console = Console(highlight=False)
    report.show_table(title, rows)


def _refuse(name: str, reason: ConfigError | str) -> bool:
    print(f"{PROGRAM}: {_prefix(name)}{reason}", file=sys.stderr)
    return True


def _prefix(name: str) -> str:
    """Which model a line is about; "" for the only one, which has no name."""
    if not name:
        return ""
    return f"{name}: "
