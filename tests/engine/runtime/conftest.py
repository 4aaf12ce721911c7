"""What tests of compiled programs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.runtime.h200 import Compiler


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    """XLA's compiler for an H200, one process for all tests of a module: importing takes it
    seconds."""
    process = Compiler()
    yield process
    process.close()
