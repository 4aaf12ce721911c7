"""How much memory the host has for this process, and how many KV pages of it there will be. Imports
no jax."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from jaxllm.config import SWAP_SPACE, ConfigError, EngineConfig
from jaxllm.engine.runtime.pinned_memory import LEAVING, PLAN_LOADS
from jaxllm.units import GIB

OTHERS = GIB  # of host memory, for everything that is no page
PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # read by XLA's client when it is made
USUAL_PINNED = 64  # GiB that it takes without that variable
MOVED = 32 * 2**20  # bytes that one program moves between the pool and host memory
# Programs' worth of such pages on the device at once: those on their way out and in, those that the
# next plan puts, and two more that the programs read or have made.
STAGED = LEAVING + 2 * PLAN_LOADS + 2
MOST_MOVED = 32  # pages


@dataclass(frozen=True)
class HostRoom:
    """Bytes of host memory that pages may take, why not more, and what would change that."""

    size: int
    why: str = "is available"
    remedy: str = ""

    @staticmethod
    def of(platform: str) -> HostRoom:
        """On this machine, where pages of GPUs lie in pinned memory."""
        free = HostRoom(max(0, available_bytes() - OTHERS))
        if platform != "gpu":
            return free
        remedy = f", or set the environment variable {PINNED_LIMIT} to more GiB than {pinned_limit() // GIB}"
        return min(
            free,
            HostRoom(max(0, pinned_limit() - OTHERS), "may be pinned", remedy),
            key=lambda room: room.size,
        )


@dataclass(frozen=True)
class HostPlan:
    """Pages of host memory for what the pool has no room for: in all, those for cached prefixes,
    and how many move at once."""

    pages: int = 0
    cached: int = 0
    moved: int = 0

    @property
    def staged(self) -> int:
        """Pages on the device that are on their way out or in, at most."""
        return STAGED * self.moved


def plan_host(
    config: EngineConfig, page: int, shards: int, caching: bool, room: HostRoom
) -> HostPlan:
    """Host memory for pages of `page` bytes on each of `shards` devices. Raises ConfigError when
    there is less than was asked for, and when it would be for prefixes of a model that shares
    none."""
    if config.kv_offloading_size and not caching:
        raise ConfigError(
            "--kv-offloading-size keeps cached prefixes, but beyond its native length this model's keys depend on the prompt's length "
            "(dynamic RoPE) and no prefix is shared; leave it out, or lower --max-model-len to that length"
        )
    swap = (
        (SWAP_SPACE if config.swap_space is None else config.swap_space)
        if config.preemption_mode == "swap"
        else 0.0
    )
    cached = _whole_pages("--kv-offloading-size", config.kv_offloading_size or 0, page * shards)
    pages = _whole_pages("--swap-space", swap, page) + cached
    if pages * page * shards > room.size:
        raise ConfigError(
            f"pages in host memory need {pages * page * shards / GIB:.2f} GiB, but {room.size / GIB:.2f} GiB {room.why}, with "
            f"{OTHERS / GIB:.0f} GiB left for everything else; lower --swap-space (per device) or --kv-offloading-size{room.remedy}"
        )
    moved = max(1, min(MOST_MOVED, MOVED // page)) if pages else 0
    return HostPlan(pages, cached, 1 << (moved.bit_length() - 1) if moved else 0)


def _whole_pages(option: str, size: float, page: int) -> int:
    """Pages of so many bytes in `size` GiB. Raises ConfigError when something was asked for that
    holds none."""
    if size and size * GIB < page:
        raise ConfigError(
            f"{option} {size:g} GiB holds no KV page, which takes {page / GIB:.4f} GiB; raise it, or leave it out"
        )
    return int(size * GIB) // page


def pinned_limit(environment: Mapping[str, str] = os.environ) -> int:
    """Bytes of pinned memory that XLA's GPU client gives in all."""
    asked = environment.get(PINNED_LIMIT, "")
    return (int(asked) if asked.isdecimal() else USUAL_PINNED) * GIB


def available_bytes(
    cgroup: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int:
    """Memory that this process may still take: of what the machine has free, what its control
    groups and those around them allow."""
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
    """What each memory limit leaves of the hierarchy that a line of /proc/self/cgroup names: of
    version 2, or of version 1 for memory."""
    _, controllers, path = line.split(":", 2)
    if controllers and "memory" not in controllers.split(","):
        return
    root, names = mount, ("memory.max", "memory.current", "inactive_file")
    if controllers:
        root, names = (
            mount / "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
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
