"""Sums over 2, 4 and 8 H200s, compiled without one: each is one plain kernel, whose PTX has the
instructions of the protocol and no others that reach beyond the device."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from pallas_kernels.all_reduce.plan import is_one_shot
from tests.engine.runtime.h200 import missing
from tests.pallas_kernels.peers_for_h200 import Compiled, compiled

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

WIDTH = 1024
PIECES = 1  # groups of 16 bytes that a thread has of a row
LEGAL = re.compile(
    r"(ld|st)(\.param::entry|\.global|\.shared|\.relaxed\.sys\.global)?(\.v[24])?\.[bu]\d+"
)
ACCESS = re.compile(r"(@\w+ |@%\w+ )?((ld|st|red|atom|multimem|cp|fence|membar|mapa)[.\w:]*)")


def accesses(ptx: list[str]) -> Counter[str]:
    """How often each instruction that accesses or orders memory stands there."""
    found = (ACCESS.match(line) for line in ptx)
    return Counter(match[2] for match in found if match)


def check(made: Compiled, op: str, devices: int, rows: int) -> None:
    """One launch with the buffers of the program's own arguments, and the protocol's accesses."""
    calls = [line for line in made.hlo if "custom-call(" in line]
    assert len(calls) == 1 and "mosaic_gpu_v2" in calls[0]
    text = "\n".join(made.hlo)
    assert not re.search(r" (all-\w+|collective-\w+|reduce-scatter|copy)(-start)?\(", text)
    found = accesses(made.ptx)
    strange = {name for name in found if not LEGAL.fullmatch(name)}
    assert strange <= {"fence.mbarrier_init.release.cluster"}, strange  # Mosaic's own, at its begin
    one = op == "largest" or is_one_shot(devices, rows * WIDTH * 2)
    width = "v2" if op == "largest" else "v4"
    sent = devices - 1 if devices == 2 else devices if one else 1 + devices
    taken = 1 if devices == 2 else devices if one else devices + 1
    assert found[f"st.relaxed.sys.global.{width}.b32"] == PIECES * (sent + taken)
    assert found[f"ld.relaxed.sys.global.{width}.b32"] == PIECES * taken


CASES = [
    ("add_norm", 2, 3),
    ("add_norm", 4, 600),
    ("largest", 8, 3),
    ("largest", 2, 3),
    ("add_norm", 4, 3),
    ("add_norm", 8, 3),
    ("add_norm", 8, 2048),
    ("all_reduce", 2, 3),
    ("all_reduce", 8, 2048),
]
FAST = 1


def programs(cases: list[tuple[str, int, int]]) -> list[Compiled]:
    wanted: list[dict[str, Any]] = [
        {"op": op, "devices": devices, "rows": rows, "width": WIDTH} for op, devices, rows in cases
    ]
    return compiled(*wanted)


def test_a_sum_over_devices_is_one_kernel_of_plain_loads_and_stores() -> None:
    for case, made in zip(CASES[:FAST], programs(CASES[:FAST]), strict=True):
        check(made, *case)


@pytest.mark.slow
def test_every_exchange_is_one_kernel_of_plain_loads_and_stores() -> None:
    for case, made in zip(CASES[FAST:], programs(CASES[FAST:]), strict=True):
        check(made, *case)


def test_a_sum_that_a_device_may_leave_out_uses_the_inboxes_themselves() -> None:
    (made,) = compiled({"op": "absent", "devices": 2, "rows": 3, "width": WIDTH})
    text = "\n".join(made.hlo)
    assert text.count("mosaic_gpu_v2") == 1 and " conditional(" in text
    assert not re.search(r" (all-\w+|collective-\w+|reduce-scatter)(-start)?\(", text)
    # A copy would be another place than the one that the peers store into
    assert not re.search(r"s32\[\d+\]\S* copy\(", text)
    assert re.search(r"= s32\[\d+\]\S* parameter\(4\)", text)


@pytest.mark.slow
@pytest.mark.parametrize("width", [256, 896 * 2, 2560, 3584, 4096, 5120, 8192])
def test_rows_of_every_supported_width_compile(width: int) -> None:
    wanted = [
        {"op": "add_norm", "devices": devices, "rows": rows, "width": width}
        for devices, rows in ((2, 1), (2, 2048), (8, 1), (8, 2048))
    ]
    assert all(made.ptx for made in compiled(*wanted))
