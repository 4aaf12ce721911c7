"""Forwards that take memory of the host, compiled for an H200 as a later start reads them: they
still know whose memory it is."""

from __future__ import annotations

import pytest

from tests.engine.runtime.h200 import Compiler, missing
from tests.engine.runtime.test_compiled_for_h200 import check

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
MODEL = "llama-3.1-8b"


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "peers"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("place", [0, -1])
def test_a_kept_step_with_prompts_copies_the_hosts_buffer_once_and_no_pages(
    place: int, devices: int, peers: bool, compiler: Compiler
) -> None:
    given = {"places": [place], "devices": devices, "peers": peers, "kept": True}
    reports = compiler.reports(model=MODEL, kind="extend", **given)
    check(MODEL, reports)
    assert [report["host_reads"] for report in reports] == [["copy-start"]]
