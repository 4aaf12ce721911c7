"""What warpgroups of a kernel ask for fits in the registers that its block begins with."""

from __future__ import annotations

import pytest

from pallas_kernels.mosaic_gpu import PRODUCER_REGISTERS, THREADS, registers_of


@pytest.mark.parametrize("producers", [1, 2])
@pytest.mark.parametrize("consumers", [1, 2, 3, 4])
def test_no_warpgroup_waits_for_registers_that_nobody_gives_back(
    consumers: int, producers: int
) -> None:
    threads = THREADS * (consumers + producers)
    # Of a thread, in eights; no thread can have more than 255
    begins_with = min(65536 // threads // 8 * 8, 255)
    asked = producers * PRODUCER_REGISTERS + consumers * registers_of(consumers, producers)
    assert asked * THREADS <= begins_with * threads
    assert registers_of(consumers, producers) % 8 == 0


def test_the_shares_of_kernels_that_are_known_to_run() -> None:
    assert [registers_of(consumers) for consumers in (1, 2, 3)] == [232, 232, 152]
