"""How much memory an engine may use on its devices."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import psutil
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.startup.memory import usable_bytes
from jaxllm.units import GIB


@dataclass(frozen=True)
class Device:
    """An accelerator whose client may take `limit` bytes, of which `used` are taken."""

    limit: int
    used: int = 0
    platform: str = "gpu"
    process_index: int = 0

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.limit, "bytes_in_use": self.used}


def test_the_device_with_least_free_memory_counts() -> None:
    devices = [Device(100 * GIB), Device(120 * GIB, 50 * GIB), Device(90 * GIB)]
    assert usable_bytes(EngineConfig(), devices) == 70 * GIB
    assert usable_bytes(EngineConfig(), devices[::-1]) == 70 * GIB
    assert usable_bytes(EngineConfig(), devices[:1]) == 100 * GIB


def test_devices_of_other_hosts_are_theirs_to_measure() -> None:
    devices = [Device(100 * GIB), Device(1, process_index=1)]
    assert usable_bytes(EngineConfig(), devices) == 100 * GIB


def test_devices_of_the_host_share_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GIB))
    devices = [Device(0, platform="cpu")] * 2
    assert usable_bytes(EngineConfig(gpu_memory_utilization=0.5), devices) <= 5 * GIB
