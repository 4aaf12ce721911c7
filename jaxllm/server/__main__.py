"""`python -m jaxllm.server`: check the options, bind the port, start the engine, serve.

Imports come with the functions that need them: an interrupt during an import ends the process
without a traceback, too.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxllm.server.command_line.options import Options


def main(argv: list[str] | None = None, command: tuple[str, ...] | None = None) -> int:
    """Returns the exit status: 0 after a clean stop, 1 after a failure, with one line on stderr,
    130 after an interrupt.

    `command` replaces the engine process in tests.
    """
    try:
        from jaxllm.server.command_line.pipes import while_read

        return while_read(lambda: start(sys.argv[1:] if argv is None else argv, command))
    except KeyboardInterrupt:
        return 130


def start(argv: list[str], command: tuple[str, ...] | None) -> int:
    """`main`, except for interrupts."""
    import logging

    from jaxllm.config import ConfigError
    from jaxllm.server.command_line.options import parse_models
    from jaxllm.server.logs import configure

    # No warning that PyTorch is missing
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    models = parse_models(argv, os.environ)
    options = models[0]
    configure(options.log_level, options.log_format, options.access_log)
    if options.hf_token is not None:
        os.environ["HF_TOKEN"] = options.hf_token
    try:
        return run(models, command)
    except ConfigError as error:
        if options.log_format == "json":
            logging.getLogger("jaxllm.server").error("%s", error)
        else:
            print(f"jaxllm: error: {error}", file=sys.stderr)
        return 1


def run(models: list[Options], command: tuple[str, ...] | None = None) -> int:
    """Check everything, the cheapest first, before anything is loaded; then serve."""
    import asyncio
    import logging

    from jaxllm.chat_template import template_text
    from jaxllm.server.command_line.options import check_generation_config
    from jaxllm.server.engine.connection import ENGINE_COMMAND
    from jaxllm.server.lifecycle.follow import follow
    from jaxllm.server.lifecycle.launches import engine_launches
    from jaxllm.server.lifecycle.serve import find_model, serve
    from jaxllm.server.transport.event_loop import new_event_loop
    from jaxllm.server.transport.sockets import bound

    options = models[0]
    log = ("--log-format", options.log_format, "--log-level", options.log_level)
    command = command or (*ENGINE_COMMAND, *log)
    if options.config.node_rank:
        (launch,) = engine_launches(options, find_model(options))
        return follow(launch.config, launch.command(command))
    for model in models:
        check_generation_config(model.generation_config)
        if model.chat_template is not None:
            template_text(model.chat_template)
    with bound(options.host, options.port, options.uds) as sock:
        checkpoints = [(model, find_model(model)) for model in models]
        logger = logging.getLogger("jaxllm.server")
        for model in models:
            logger.info("options: %s", model.summary or "all defaults")
        for notice in dict.fromkeys(notice for model in models for notice in model.notices):
            logger.warning("%s", notice)
        return asyncio.run(serve(checkpoints, sock, command), loop_factory=new_event_loop)


if __name__ == "__main__":
    raise SystemExit(main())
