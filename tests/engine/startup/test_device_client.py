"""What the device's client is told before it exists, and memory that goes back to the driver."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from types import SimpleNamespace

import jax
import pytest

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.startup import device_client
from jaxllm.engine.startup.device_client import (
    give_back,
    may_use_cuda,
    own_processors,
    reserve_as,
    reserve_memory,
)


@pytest.mark.usefixtures("cuda_installed")
@pytest.mark.parametrize("platforms", [None, "cuda", "cuda,cpu"])
def test_a_cuda_client_is_told_its_share(platforms: str | None) -> None:
    jax.config.update("jax_platforms", platforms)
    reserve_memory(0.9)
    assert jax.config.jax_pjrt_client_create_options == {"memory_fraction": 0.9}


@pytest.mark.usefixtures("cuda_installed")
def test_another_share_in_the_same_process_is_refused() -> None:
    reserve_memory(0.9)
    reserve_memory(0.9)
    with pytest.raises(ConfigError, match="has taken its share"):
        reserve_memory(0.5)


@pytest.mark.usefixtures("cuda_installed")
@pytest.mark.parametrize("platforms", ["cpu", "tpu,cpu"])
def test_other_platforms_clients_get_no_options_that_they_do_not_know(platforms: str) -> None:
    jax.config.update("jax_platforms", platforms)
    reserve_memory(0.9)
    assert jax.config.jax_pjrt_client_create_options is None


def test_without_the_cuda_plugin_there_is_no_cuda(
    cuda_installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_client, "entry_points", lambda group: [])
    assert not may_use_cuda()


@pytest.mark.usefixtures("cuda_installed")
def test_an_engine_that_may_sleep_takes_memory_that_the_driver_can_have_back() -> None:
    reserve_as(EngineConfig(gpu_memory_utilization=0.4, enable_sleep_mode=True))
    assert jax.config.jax_pjrt_client_create_options == {
        "memory_fraction": 0.4,
        "allocator": "cuda_async",
        "preallocate": False,
    }
    with pytest.raises(ConfigError, match="same gpu_memory_utilization and enable_sleep_mode"):
        reserve_as(EngineConfig(gpu_memory_utilization=0.4))


class Driver:
    """CUDA's driver API, as far as names and results go."""

    def __init__(self, failing: str | None = None, mps: bool = False):
        self.failing, self.mps, self.calls = failing, mps, []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            if name == "cuDeviceGetDefaultMemPool":
                arguments[0]._obj.value = 7
            if name == "cuDeviceGetAttribute":
                found, attribute, _ = arguments
                assert attribute == 133
                found._obj.value = self.mps
            if name == "cuMemPoolTrimTo":
                pool, size = arguments
                assert (pool.value, size.value) == (7, 0)
            return 201 if name == self.failing else 0

        return call


def gpus(count: int) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(platform="gpu", local_hardware_id=i, process_index=0, core_count=132)
        for i in range(count)
    ]


def test_every_gpu_is_waited_for_and_its_pool_trimmed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    give_back(gpus(2))
    steps = [call for call in driver.calls if call in ("cuCtxSynchronize", "cuMemPoolTrimTo")]
    assert steps == ["cuCtxSynchronize", "cuMemPoolTrimTo"] * 2
    assert driver.calls.count("cuCtxPushCurrent_v2") == driver.calls.count("cuCtxPopCurrent_v2")


def test_other_devices_have_no_driver_to_give_memory_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("no library is wanted"))
    give_back(jax.devices())


def test_a_driver_that_refuses_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver("cuMemPoolTrimTo"))
    with caplog.at_level(logging.WARNING, "jaxllm"):
        give_back(gpus(1))
    assert "GPU 0 stays with this process: cuMemPoolTrimTo returned error 201" in caplog.text


def test_processors_are_known_where_no_other_process_shares_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    few, many = gpus(2)
    few.core_count = 114
    assert own_processors([many]) == 132
    assert own_processors([many, few]) == 114


@pytest.mark.parametrize(
    "driver",
    [Driver(mps=True), Driver("cuDeviceGetAttribute"), None],
    ids=["mps", "an old driver", "none"],
)
def test_processors_are_not_known_under_mps_or_where_the_driver_does_not_say(
    driver: Driver | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(name: str) -> Driver:
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(ctypes, "CDLL", library)
    assert own_processors(gpus(2)) == 0


def test_other_devices_have_no_driver_to_ask_for_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail("no library is wanted"))
    assert own_processors(jax.devices()) == 0
