"""The step programs, found by listing this folder."""

from __future__ import annotations

import importlib
import pkgutil

from jaxllm.engine.runtime.program import Program


def _load() -> dict[str, Program]:
    modules = (
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    )
    found = [x for module in modules for x in vars(module).values() if isinstance(x, Program)]
    return {program.name: program for program in sorted(found, key=lambda program: program.rank)}


PROGRAMS = _load()
