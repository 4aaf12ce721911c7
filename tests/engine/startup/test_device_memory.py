"""How much memory an engine may use on its devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.startup.budget import usable_bytes
from jaxllm.units import GIB


@dataclass(frozen=True)
class Device:
    """An accelerator whose client may take `limit` bytes, of which `used` are taken."""

    limit: int
    used: int = 0
    platform: str = "gpu"
    process_index: int = 0
    local_hardware_id: int = 0

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.limit, "bytes_in_use": self.used}


@dataclass(frozen=True)
class Driver:
    """CUDA's driver of a card with this memory; `code` is its answer about it."""

    free: int
    total: int
    code: int = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        free._obj.value, total._obj.value = self.free, self.total
        return self.code


def test_the_device_with_least_free_memory_counts() -> None:
    devices = [Device(100 * GIB), Device(120 * GIB, 50 * GIB), Device(90 * GIB)]
    assert usable_bytes(EngineConfig(), devices) == 70 * GIB
    assert usable_bytes(EngineConfig(), devices[::-1]) == 70 * GIB
    assert usable_bytes(EngineConfig(), devices[:1]) == 100 * GIB


def test_devices_of_other_hosts_are_theirs_to_measure() -> None:
    devices = [Device(100 * GIB), Device(1, process_index=1)]
    assert usable_bytes(EngineConfig(), devices) == 100 * GIB


@pytest.mark.parametrize(
    ("free", "used", "usable"),
    [(130, 0, 126), (100, 0, 100), (130, 20, 106)],
    ids=["its share of the card", "what others leave", "less what it has taken"],
)
def test_an_allocator_without_a_limit_has_the_cards(
    monkeypatch: pytest.MonkeyPatch, free: int, used: int, usable: int
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(free * GIB, 140 * GIB))
    assert usable_bytes(EngineConfig(), [Device(0, used * GIB)]) == usable * GIB


def test_a_driver_that_does_not_answer_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(0, 0, code=100))
    with pytest.raises(RuntimeError, match=r"memory of GPU 0: .* error 100 of CUDA"):
        usable_bytes(EngineConfig(), [Device(0)])


def test_devices_of_the_host_share_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    devices = [Device(0, platform="cpu")] * 2
    assert usable_bytes(EngineConfig(gpu_memory_utilization=0.5), devices) <= 5 * GIB
