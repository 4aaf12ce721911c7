"""Programs for which a device has no memory while others are compiled."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax
import pytest

from jaxllm.config import ConfigError
from jaxllm.engine.runtime.lattice import Programs
from jaxllm.engine.scheduling.buckets import Buckets
from jaxllm.mesh import make_mesh
from tests.engine.conftest import TINY
from tests.engine.runtime.step_programs import lattice


@functools.cache
def shapes() -> Any:
    buckets = Buckets.build(4, 256, "cpu")
    return lattice(TINY, make_mesh(1), "xla", buckets, page_size=16, pages=64).shapes


class Crowded:
    """Executables that fail for the first program, a number of times."""

    def __init__(self, failures: int, message: str):
        self.failures, self.message = failures, message
        self.failed, self.made = "", list[str]()
        self._lock = threading.Lock()

    def compile(self, name: str, *_: Any, **__: Any) -> Any:
        with self._lock:
            if self.failures and self.failed in ("", name):
                self.failures -= 1
                self.failed = name
                raise jax.errors.JaxRuntimeError(self.message)
        self.made.append(name)
        return name

    def tunes(self, *_: Any) -> bool:
        return False


def compiled(failures: int, message: str = "NOT_FOUND: RESOURCE_EXHAUSTED: out") -> Crowded:
    crowded: Any = Crowded(failures, message)
    programs = Programs(shapes(), crowded)
    programs.compile([key for key in programs.lattice if key.program in ("decode", "extend")][-4:])
    return crowded


def test_a_program_that_found_no_memory_is_compiled_once_more_behind_the_others() -> None:
    usual, crowded = compiled(0), compiled(1)
    assert sorted(crowded.made) == sorted(usual.made)
    assert len(usual.made) == 4 and crowded.made[-1] == crowded.failed


def test_a_program_that_finds_no_memory_by_itself_is_one_line_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"compile \w+-.*lower --gpu-memory-utilization"):
        compiled(100)


def test_other_errors_of_the_compiler_are_not_tried_again() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        compiled(1, "INTERNAL: no")
