"""What JAX's NVIDIA client has of its devices: memory, which it takes and gives back, and
processors."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

import jax

from jaxllm.config import ConfigError, EngineConfig

logger = logging.getLogger("jaxllm")

# Memory of the driver's pool, which other processes get when it is trimmed; the usual allocator
# never returns what it has taken
GIVES_BACK = {"allocator": "cuda_async", "preallocate": False}
MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED of cuda.h


def reserve_memory(fraction: float, gives_back: bool = False) -> None:
    """Set the share of device memory that JAX's NVIDIA client takes when it is made, and whether
    `give_back` can return it. Clients of other platforms have no such options.

    Raises ConfigError when an engine in this process has set others.
    """
    if not may_use_cuda():
        return
    before = jax.config.jax_pjrt_client_create_options
    wanted = {"memory_fraction": fraction} | (GIVES_BACK if gives_back else {})
    if before and before != wanted:
        raise ConfigError(
            f"this process has taken its share of the device's memory already ({before}); "
            "use the same gpu_memory_utilization and enable_sleep_mode, or a process of its own"
        )
    jax.config.update("jax_pjrt_client_create_options", wanted)


def reserve_as(config: EngineConfig) -> None:
    """`reserve_memory` as the configuration wants it."""
    reserve_memory(config.gpu_memory_utilization, config.enable_sleep_mode)


def may_use_cuda() -> bool:
    """Whether JAX will try NVIDIA GPUs: its CUDA plugin is installed, and no other platform was
    chosen."""
    asked = jax.config.jax_platforms
    if asked and not {"cuda", "gpu"} & set(asked.split(",")):
        return False
    return any("cuda" in plugin.name for plugin in entry_points(group="jax_plugins"))


def give_back(devices: Iterable[jax.Device]) -> None:
    """Return to the driver what the allocators of this host's GPUs among these hold free.

    Frees are in the order of streams, so all work is waited for first. A driver that refuses
    leaves the memory with this process, with a warning.
    """
    if ordinals := _own_gpus(devices):
        driver = ctypes.CDLL("libcuda.so.1")
        for ordinal in ordinals:
            _trim(driver, ordinal)


def limit_bytes(device: Any, fraction: float) -> int:
    """Bytes of this accelerator that this process may take, or 0 where its client does not say.

    The usual allocator knows its limit. One that gives back has none: there it is this share of
    the card.
    """
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit or device.platform != "gpu":
        return int(limit or 0)
    return int(card_bytes(device)[1] * fraction)


def unused_bytes(device: Any, fraction: float) -> int:
    """What is left of `limit_bytes`, or less: where the card itself has less free."""
    stats = device.memory_stats() or {}
    left = limit_bytes(device, fraction) - int(stats.get("bytes_in_use", 0))
    if stats.get("bytes_limit") or device.platform != "gpu":
        return left  # the allocator has taken it from the card already
    return min(left, card_bytes(device)[0])


def card_bytes(device: Any) -> tuple[int, int]:
    """Free and all memory of a GPU of this host. Raises RuntimeError when the driver refuses."""
    free = ctypes.c_size_t()
    total = ctypes.c_size_t()
    failed = _call(
        ctypes.CDLL("libcuda.so.1"),
        device.local_hardware_id,
        [("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))],
    )
    if failed:
        ordinal = device.local_hardware_id
        raise RuntimeError(f"CUDA does not tell the memory of GPU {ordinal}: {failed}")
    return free.value, total.value


def own_processors(devices: Iterable[jax.Device]) -> int:
    """Processors of each device that a kernel of this process has to itself; 0: not known.

    Where NVIDIA's MPS runs, kernels of several processes run side by side. An old driver does not
    say whether it does, and counts as one with it.
    """
    devices = list(devices)
    if any(map(_may_share, _own_gpus(devices))):
        return 0
    return min(getattr(device, "core_count", None) or 0 for device in devices)


def _own_gpus(devices: Iterable[jax.Device]) -> list[int]:
    """The numbers that CUDA gives this host's GPUs among these."""
    gpus = [device for device in devices if device.platform == "gpu"]
    return [gpu.local_hardware_id for gpu in gpus if gpu.process_index == jax.process_index()]


def _may_share(ordinal: int) -> bool:
    """Whether kernels of other processes may run beside ours on a GPU."""
    device = ctypes.c_int()
    shared = ctypes.c_int()
    calls: list[tuple[Any, ...]] = [
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(device), ordinal),
        ("cuDeviceGetAttribute", ctypes.byref(shared), MPS_ENABLED, device),
    ]
    try:
        return bool(_first_failure(ctypes.CDLL("libcuda.so.1"), calls) or shared.value)
    except OSError:  # a GPU of another maker
        return True


def _trim(driver: ctypes.CDLL, ordinal: int) -> None:
    """XLA's cuda_async allocator takes from the device's default pool."""
    device = ctypes.c_int()
    pool = ctypes.c_void_p()
    failed = _call(
        driver,
        ordinal,
        [
            ("cuCtxSynchronize",),
            ("cuDeviceGet", ctypes.byref(device), ordinal),
            ("cuDeviceGetDefaultMemPool", ctypes.byref(pool), device),
            ("cuMemPoolTrimTo", pool, ctypes.c_size_t(0)),
        ],
    )
    if failed:
        logger.warning("memory of GPU %d stays with this process: %s", ordinal, failed)


def _call(driver: ctypes.CDLL, ordinal: int, calls: list[tuple[Any, ...]]) -> str | None:
    """Call CUDA's driver API in the context that JAX's client made; returns what failed."""
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    enter: list[tuple[Any, ...]] = [
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(device), ordinal),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
        ("cuCtxPushCurrent_v2", context),
    ]
    leave: list[tuple[Any, ...]] = [
        ("cuCtxPopCurrent_v2", ctypes.byref(context)),
        ("cuDevicePrimaryCtxRelease_v2", device),
    ]
    if failed := _first_failure(driver, enter):
        return failed
    failed = _first_failure(driver, calls)
    left = _first_failure(driver, leave)
    return failed or left


def _first_failure(driver: ctypes.CDLL, calls: list[tuple[Any, ...]]) -> str | None:
    for name, *arguments in calls:
        if code := getattr(driver, name)(*arguments):
            return f"{name} returned error {code} of CUDA"
    return None
