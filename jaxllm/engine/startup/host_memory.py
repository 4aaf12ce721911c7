"""Host memory that this process may take, and the KV pages that it will hold. Imports no jax."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from jaxllm.config import SWAP_SPACE, ConfigError, EngineConfig
from jaxllm.engine.runtime.page_swapper import GIVE_MEMORY, LEAVING, PLAN_LOADS, TAKEN
from jaxllm.units import GIB, amount

OTHERS = GIB  # of host memory, for everything but pages
PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # read by XLA's client when it is made
USUAL_PINNED = 64  # GiB, its limit without that variable
MOVED = 32 * 2**20  # bytes that one program moves between the pool and host memory
# Programs' worth of such pages on the device at once: on their way out and in, put by the next
# plan, and two more that the programs read or have made
STAGED = LEAVING + 2 * PLAN_LOADS + 2
MOST_MOVED = 32  # pages


@dataclass(frozen=True)
class HostRoom:
    """Bytes of host memory that pages may take.

    Attributes:
        size: in bytes.
        why: the limit, for messages.
        remedy: how to raise it, for messages.
    """

    size: int
    why: str = "is available"
    remedy: str = ""

    @staticmethod
    def measure(platform: str) -> HostRoom:
        """On this machine. Pages of GPUs lie in pinned memory."""
        free = HostRoom(max(0, available_bytes() - OTHERS))
        if platform != "gpu":
            return free
        remedy = (
            f", or set the environment variable {PINNED_LIMIT} to more GiB than "
            f"{pinned_limit() // GIB}"
        )
        return min(
            free,
            HostRoom(max(0, pinned_limit() - OTHERS), "may be pinned", remedy),
            key=lambda room: room.size,
        )


@dataclass(frozen=True)
class HostPlan:
    """Pages of host memory, for requests and prefixes that the pool cannot hold.

    Attributes:
        pages: in all.
        cached: for cached prefixes.
        moved: that one program moves.
        staged: the most pages on the device that are on their way out or in.
    """

    pages: int = 0
    cached: int = 0
    moved: int = 0
    staged: int = 0


def plan_host(
    config: EngineConfig, page: int, shards: int, caching: bool, room: HostRoom
) -> HostPlan:
    """Host memory for pages of `page` bytes on each of `shards` devices.

    Raises ConfigError when there is less than was asked for, and when prefixes are to be kept of a
    model that shares none.
    """
    if config.kv_offloading_size and not caching:
        raise ConfigError(
            "--kv-offloading-size keeps cached prefixes, but beyond its native length this model's "
            "keys depend on the prompt's length (dynamic RoPE) and no prefix is shared; "
            "leave it out, or lower --max-model-len to that length"
        )
    swap = 0.0
    if config.preemption_mode == "swap":
        if config.swap_space is None:
            swap = SWAP_SPACE
        else:
            swap = config.swap_space
    cached = _whole_pages("--kv-offloading-size", config.kv_offloading_size or 0, page * shards)
    pages = _whole_pages("--swap-space", swap, page) + cached
    if pages * page * shards > room.size:
        raise ConfigError(
            f"pages in host memory need {pages * page * shards / GIB:.2f} GiB, but "
            f"{room.size / GIB:.2f} GiB {room.why}, with {OTHERS / GIB:.0f} GiB left for "
            f"everything else; {GIVE_MEMORY}{room.remedy}"
        )
    if not pages:
        return HostPlan()
    moved = 1 << (max(1, min(MOST_MOVED, MOVED // page)).bit_length() - 1)
    transfer = config.kv_transfer_config
    sends = transfer is not None and transfer.get("kv_role") != "kv_consumer"
    staged = STAGED + (TAKEN if sends else 0)
    return HostPlan(pages, cached, moved, staged * moved)


def _whole_pages(option: str, size: float, page: int) -> int:
    """Pages of `page` bytes in `size` GiB. Raises ConfigError where a size holds none."""
    if not size:
        return 0
    if size * GIB < page:
        raise ConfigError(
            f"{option} {size:g} GiB holds no KV page, which takes {amount(page)}; "
            "raise it, or leave it out"
        )
    return int(size * GIB) // page


def pinned_limit(environment: Mapping[str, str] = os.environ) -> int:
    """Bytes of pinned memory that XLA's GPU client may take in all."""
    asked = environment.get(PINNED_LIMIT, "")
    return (int(asked) if asked.isdecimal() else USUAL_PINNED) * GIB


def available_bytes(
    cgroup: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int:
    """Bytes that this process may still take: the machine's free memory, within the limits of its
    control groups and their parents."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    return min(
        [
            psutil.virtual_memory().available,
            *(left for line in lines for left in _left(line, mount)),
        ]
    )


def _left(line: str, mount: Path) -> Iterator[int]:
    """Bytes that each memory limit leaves, in the hierarchy that a line of /proc/self/cgroup names:
    version 2, or version 1's memory controller."""
    _, controllers, path = line.split(":", 2)
    if controllers and "memory" not in controllers.split(","):
        return
    root, *names = (
        (mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if controllers
        else (mount, "memory.max", "memory.current", "inactive_file")
    )
    own = PurePosixPath(path.lstrip("/"))
    # A container may see its own group as the root, under the path that the host knows
    for folder in (own, *own.parents):
        try:
            limit, used = ((root / folder / name).read_text().strip() for name in names[:2])
            stat = dict(
                pair.split(" ", 1)
                for pair in (root / folder / "memory.stat").read_text().splitlines()
            )
        except OSError:
            continue
        if limit != "max":
            yield max(0, int(limit) - int(used) + int(stat.get(names[2], 0)))
