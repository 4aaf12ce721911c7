"""The step programs, one file each, found by listing this folder."""

from __future__ import annotations

import importlib
import pkgutil

from jaxllm.engine.runtime.program import Program


def _load() -> dict[str, Program]:
    modules = (
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    )
    found: list[Program] = [module.PROGRAM for module in modules]
    return {program.name: program for program in sorted(found, key=lambda program: program.rank)}


PROGRAMS = _load()
