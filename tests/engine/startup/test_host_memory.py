"""How much host memory there is: what the machine has free, what control groups leave, what may be
pinned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import psutil
import pytest

from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime.page_swapper import TAKEN, PageSwapper
from jaxllm.engine.startup import host_memory
from jaxllm.engine.startup.host_memory import (
    MOVED,
    OTHERS,
    PINNED_LIMIT,
    STAGED,
    HostPlan,
    HostRoom,
    available_bytes,
    pinned_limit,
    plan_host,
)
from jaxllm.engine.startup.limits import PRODUCER_TOKENS
from jaxllm.units import GIB
from tests.engine.runtime.test_unsaved import Unmade

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 GiB."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=200 * GIB))


def group(
    folder: Path, names: tuple[str, str, str], limit: int | str, used: int = 0, cached: int = 0
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\nslab 3\n")


def found(tmp_path: Path, lines: str) -> int:
    (tmp_path / "self").write_text(lines)
    return available_bytes(tmp_path / "self", tmp_path / "mount")


def test_a_limit_of_version_2_counts_less_what_is_used_and_cannot_be_reclaimed(
    tmp_path: Path,
) -> None:
    group(tmp_path / "mount" / "pod" / "main", V2, 10 * GIB, 4 * GIB, GIB)
    assert found(tmp_path, "0::/pod/main\n") == 7 * GIB
    group(tmp_path / "mount" / "pod", V2, 12 * GIB, 9 * GIB)
    assert found(tmp_path, "0::/pod/main\n") == 3 * GIB, "a group around it is tighter"
    group(tmp_path / "mount" / "pod", V2, "max", 9 * GIB)
    assert found(tmp_path, "0::/pod/main\n") == 7 * GIB
    group(tmp_path / "mount" / "pod" / "main", V2, GIB, 2 * GIB)
    assert found(tmp_path, "0::/pod/main\n") == 0


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    group(tmp_path / "mount", V2, 8 * GIB, 2 * GIB)
    assert found(tmp_path, "0::/\n") == 6 * GIB
    assert found(tmp_path, "0::/named/by/the/host\n") == 6 * GIB


def test_a_limit_of_version_1_counts_too(tmp_path: Path) -> None:
    group(tmp_path / "mount" / "memory" / "job", V1, 16 * GIB, 3 * GIB, 2 * GIB)
    group(tmp_path / "mount" / "memory", V1, 2**63 - 4096)
    lines = "9:name=systemd:/\n4:hugetlb,memory:/job\n3:cpu:/tight\n0::/\n"
    assert found(tmp_path, lines) == 15 * GIB
    assert found(tmp_path, "3:cpu:/job\n0::/\n") == 200 * GIB


def test_without_limits_the_machine_decides(tmp_path: Path) -> None:
    group(tmp_path / "mount", V2, 500 * GIB)
    assert found(tmp_path, "0::/\n") == 200 * GIB
    assert available_bytes(tmp_path / "none", tmp_path / "mount") == 200 * GIB


@pytest.mark.parametrize(
    ("value", "wanted"), [(None, 64), ("128", 128), ("much", 64), ("-3", 64), ("", 64)]
)
def test_what_may_be_pinned(value: str | None, wanted: int) -> None:
    assert pinned_limit({} if value is None else {PINNED_LIMIT: value}) == wanted * GIB


def test_more_than_can_be_pinned_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(PINNED_LIMIT, raising=False)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 200 * GIB)
    config = EngineConfig(preemption_mode="swap", swap_space=80)
    message = (
        "need 80.00 GiB, but 63.00 GiB may be pinned, .*lower --swap-space .*, "
        f"or set the environment variable {PINNED_LIMIT} to more"
    )
    with pytest.raises(ConfigError, match=message):
        plan_host(config, 2**20, 1, True, HostRoom.measure("gpu"))
    with pytest.raises(ConfigError, match="may be pinned"):
        plan_host(
            EngineConfig(preemption_mode="swap", swap_space=40),
            2**20,
            2,
            True,
            HostRoom.measure("gpu"),
        )
    assert plan_host(config, 2**20, 1, True, HostRoom.measure("cpu")).pages == 80 * 1024
    monkeypatch.setenv(PINNED_LIMIT, "100")
    assert plan_host(config, 2**20, 1, True, HostRoom.measure("gpu")).pages == 80 * 1024
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 50 * GIB)
    assert HostRoom.measure("gpu") == HostRoom.measure("cpu") == HostRoom(50 * GIB - OTHERS)
    with pytest.raises(ConfigError, match=r"but 49\.00 GiB is available"):
        plan_host(config, 2**20, 1, True, HostRoom.measure("gpu"))


def test_host_memory_is_counted_in_pages_of_all_devices() -> None:
    def planned(
        page: int = GIB // 64,
        shards: int = 1,
        caching: bool = True,
        room: HostRoom | None = None,
        **wishes: Any,
    ) -> HostPlan:
        return plan_host(EngineConfig(**wishes), page, shards, caching, room or HostRoom(GIB))

    assert planned() == HostPlan()
    staged = 2 * STAGED
    swaps = HostPlan(32, 0, 2, staged)
    assert planned(preemption_mode="swap", swap_space=0.5) == swaps
    assert planned(preemption_mode="swap", swap_space=0.5, shards=2) == swaps, "per device"
    assert planned(kv_offloading_size=0.5, shards=2) == HostPlan(16, 16, 2, staged), "in all"
    sends = planned(kv_offloading_size=0.5, kv_transfer_config={})
    assert sends.staged == staged + 2 * TAKEN, "pages for other engines leave beside the next step"
    fetches = planned(kv_offloading_size=0.5, kv_transfer_config={"kv_role": "kv_consumer"})
    assert fetches.staged == staged
    token = 128 * 1024  # bytes of an 8B's
    assert TAKEN * MOVED >= 2 * PRODUCER_TOKENS * token, (
        "no launch waits for pages of the step before"
    )
    assert planned(preemption_mode="swap", swap_space=0.5, caching=False).cached == 0
    with pytest.raises(
        ConfigError, match=r"no prefix is shared; leave it out, or lower --max-model-len"
    ):
        planned(kv_offloading_size=0.5, caching=False)
    assert (
        planned(
            page=GIB // 4096, preemption_mode="swap", swap_space=0.25, kv_offloading_size=0.25
        ).moved
        == 32
    )
    assert planned(preemption_mode="swap", swap_space=0.5, kv_offloading_size=0.5).pages == 64, (
        "all there is"
    )
    for wishes in ({"preemption_mode": "swap", "swap_space": 1.25}, {"kv_offloading_size": 1.25}):
        with pytest.raises(
            ConfigError,
            match=r"need 1\.25 GiB, but 1\.00 GiB is available, with 1 GiB left for .*; "
            "lower --swap-space",
        ):
            planned(**wishes)
        with pytest.raises(ConfigError, match=r"may be pinned, .*, or set PINNED$"):
            planned(room=HostRoom(GIB, "may be pinned", ", or set PINNED"), **wishes)
    with pytest.raises(
        ConfigError, match=r"--swap-space 0\.001 GiB holds no KV page, which takes 16\.00 MiB"
    ):
        planned(preemption_mode="swap", swap_space=0.001, kv_offloading_size=0.5)
    with pytest.raises(
        ConfigError,
        match=r"--kv-offloading-size 0\.02 GiB holds no KV page, which takes 32\.00 MiB",
    ):
        planned(preemption_mode="swap", swap_space=0.5, kv_offloading_size=0.02, shards=2)


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"preemption_mode": "drop"}, "must be one of recompute, swap"),
        ({"preemption_mode": "swap", "swap_space": 0}, "--swap-space is 0"),
        ({"swap_space": 9}, "--preemption-mode swap"),
        ({"swap_space": -1}, "from 0"),
        ({"preemption_mode": "swap", "swap_space": 2**21}, "from 0 to 1048576"),
        ({"swap_space": True}, "number of GiB"),
        ({"swap_space": float("nan")}, "number of GiB"),
        ({"kv_offloading_size": "4"}, "number of GiB"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "prefix caching is off"),
    ],
)
def test_options_that_ask_for_nothing_possible_are_refused(
    wishes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**wishes)
    assert EngineConfig(swap_space=4) == EngineConfig(swap_space=4.0), (
        "scripts pass it; it asks for nothing"
    )


def test_a_start_that_finds_no_host_memory_for_pages_says_so(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(swapper: PageSwapper, pages: object) -> None:
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Failed to allocate 1024 bytes of pinned memory"
        )

    monkeypatch.setattr(PageSwapper, "_to_host", full)
    with pytest.raises(
        ConfigError,
        match=r"has no [0-9.]+ .iB for the [0-9]+ KV pages that move at once; lower --swap-space",
    ):
        make_engine(
            num_gpu_blocks_override=20, enforce_eager=False, preemption_mode="swap", swap_space=0.01
        )


def test_a_start_notices_copies_that_fail_only_when_they_are_made(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(num_gpu_blocks_override=20, preemption_mode="swap", swap_space=0.01)
    assert engine.runner.swapper is not None
    why = "INTERNAL: the link is down"
    monkeypatch.setattr(
        engine.runner.swapper, "_to_host", lambda pages: ((Unmade(why),),) * len(pages)
    )
    with pytest.raises(RuntimeError, match=why):
        engine.runner.swapper.warm_up(engine.runner.kv)
    engine.runner.reset()
    monkeypatch.setattr(
        engine.runner.swapper, "_to_host", lambda pages: ((Unmade(),),) * len(pages)
    )
    with pytest.raises(
        ConfigError,
        match=r"has no [0-9.]+ .iB for the [0-9]+ KV pages that move at once; lower --swap-space",
    ):
        engine.runner.swapper.warm_up(engine.runner.kv)
