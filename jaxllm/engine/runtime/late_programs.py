"""Programs that an engine is ready without, made in a thread while it serves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from jaxllm.engine.runtime.runner import Runner

logger = logging.getLogger("jaxllm.engine")


def make_late(runner: Runner, made: Callable[[], None]) -> threading.Thread:
    """Begin to make the late programs of a runner; it uses each as soon as it is there.

    The thread is none that Python ends in the middle of a program: a process that ends waits for
    the one that is being made, and no other is begun. `made` is called by the thread after every
    program.
    """
    thread = threading.Thread(target=_make, args=(runner, made), name="late-programs")
    thread.start()
    return thread


def _make(runner: Runner, made: Callable[[], None]) -> None:
    programs = runner.programs
    began = time.perf_counter()
    for key in programs.late:
        if programs.stopped or not threading.main_thread().is_alive():
            return
        try:
            programs.get(key)
        except Exception:  # a step that needs it fails, and says why
            logger.exception("%s could not be compiled", programs.name(key))
            return
        runner.take_made()
        made()
    compiles = programs.executables.late_compiles
    logger.info(
        "made %d more step programs behind /ready in %.2f seconds: %d compiled, %d cached",
        len(programs.late),
        time.perf_counter() - began,
        compiles.compiles - compiles.cache_hits,
        compiles.cache_hits,
    )
