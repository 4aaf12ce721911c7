"""Host memory for pages, pinned at start: which regions, against XLA's allocator as it is known;
what is done when there are none."""

from __future__ import annotations

import bisect
import json
import random
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxllm.cache.arrays import PagedArrays, Zeros
from jaxllm.config import ConfigError, EngineConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime.page_swapper import GIVE_MEMORY
from jaxllm.engine.startup import pin_host_memory
from jaxllm.engine.startup.host_memory import STAGED, HostRoom
from jaxllm.engine.startup.pin_host_memory import (
    GRAIN,
    PHASE,
    UNIT,
    Pinning,
    Wanted,
    page_of,
    pinning,
)
from jaxllm.engine.startup.report import Report
from jaxllm.mesh import PINNED, make_stage_meshes, stages
from jaxllm.units import GIB
from tests.engine.conftest import TINY
from tests.engine.startup.decisions import Decided, decide
from tests.engine.startup.test_start_table import Kept

MIB = 2**20
# What XLA's allocator may give beyond an array's size before it divides what is free
AS_ASKED = 128 * MIB
PLENTY = 2**50
DEVICE = (jax.devices("cpu")[0],)


class Allocator:
    """What XLA's allocator of pinned memory does: regions that double, the smallest free piece that
    fits, and neighbours joined again."""

    def __init__(self, limit: int = 64 * GIB, region: int = 2 * MIB):
        self._limit, self._region, self._end, self.taken = limit, region, 0, 0
        self._size: dict[int, int] = {}  # of every piece, by address
        self._busy: set[int] = set()
        self._free: list[tuple[int, int]] = []  # (size, address), sorted
        # Where the piece begins that ends at an address; there is a gap between regions
        self._before: dict[int, int] = {}

    def take(self, size: int) -> int:
        size = -(-size // GRAIN) * GRAIN
        found = bisect.bisect_left(self._free, (size, -1))
        if found == len(self._free):
            self._extend(size)
            found = bisect.bisect_left(self._free, (size, -1))
        whole, at = self._free.pop(found)
        if whole >= 2 * size or whole - size >= AS_ASKED:
            self._piece(at, size)
            self._piece(at + size, whole - size)
            bisect.insort(self._free, (whole - size, at + size))
        self._busy.add(at)
        return at

    def give_back(self, at: int) -> None:
        self._busy.remove(at)
        size = self._size[at]
        for other in (at + size, self._before.get(at)):
            if other in self._size and other not in self._busy:
                self._free.remove((self._size[other], other))
                size, at = size + self._size.pop(other), min(at, other)
                self._size.pop(at, None)
        self._piece(at, size)
        bisect.insort(self._free, (size, at))

    def _piece(self, at: int, size: int) -> None:
        self._size[at], self._before[at + size] = size, at

    def _extend(self, size: int) -> None:
        left = self._limit - self.taken
        if size > left:
            raise MemoryError
        doubled = size > self._region
        while size > self._region:
            self._region *= 2
        got = min(self._region, left)
        self._region *= 1 if doubled else 2
        self.taken += got
        self._piece(self._end, got)
        bisect.insort(self._free, (got, self._end))
        self._end += got + GRAIN

    def pin(self, regions: Sequence[int]) -> int:
        """As `Pinning.pin`; the bytes that it took."""
        before = self.taken
        for at in [self.take(region) for region in regions]:
            self.give_back(at)
        return self.taken - before


@settings(max_examples=60, deadline=None)
@given(
    pages=st.integers(1, 600),
    moving=st.integers(0, 96),
    page=st.one_of(st.integers(2**11, 2**18), st.sampled_from([1, 7168, 2**14])).map(
        lambda grains: grains * GRAIN
    ),
    small=st.lists(st.integers(1, 2**16), max_size=8),
)
@example(pages=128, moving=0, page=6 * MIB, small=[])  # 768 MiB, but not in regions of 256 and 512
def test_what_is_pinned_holds_all_pages_and_little_more_whatever_was_there_before(
    pages: int, moving: int, page: int, small: list[int]
) -> None:
    regions = Wanted(pages, moving, page, DEVICE).regions(PLENTY)
    asked = (pages + moving) * page
    assert regions == sorted(set(regions)) and sum(regions) >= asked
    assert sum(regions) - asked < (2 * UNIT + 8 * page if asked > UNIT else asked)
    allocator = Allocator()
    for size in small:
        allocator.take(size)
    found = allocator.pin(regions)
    assert found == sum(regions) if asked > UNIT else found <= sum(regions) + 4 * MIB, (
        "a region for each, as large as it"
    )
    before = allocator.taken
    for _ in range(pages + moving):
        allocator.take(page)
    assert allocator.taken == before, "nothing is pinned for pages"


@pytest.mark.parametrize("arrays", [(3_670_016,), (1_835_008, 28_672)])
def test_pages_that_come_and_go_need_no_more_even_where_their_arrays_differ_in_size(
    arrays: tuple[int, ...],
) -> None:
    rng, allocator = random.Random(5), Allocator()
    pages = 7 * UNIT // sum(arrays) - 16  # so many of them that hardly anything is left of 1.75 GiB
    allocator.take(5000)
    allocator.pin(Wanted(pages, 8, page_of(arrays), DEVICE).regions(PLENTY))
    pinned_at_start, kept = (
        allocator.taken,
        [[allocator.take(size) for size in arrays] for _ in range(pages)],
    )
    for _ in range(2000):
        places = rng.sample(range(pages), rng.randint(1, 8))
        for place, copies in [
            (place, [allocator.take(size) for size in arrays]) for place in places
        ]:
            for at in kept[place]:
                allocator.give_back(at)
            kept[place] = copies
    assert allocator.taken == pinned_at_start


def test_regions_of_known_tiers() -> None:
    for page in (3_670_016, 3_670_016 // 2):
        assert Wanted(16 * GIB // page, 0, page, DEVICE).regions(64 * GIB) == [16 * GIB]
    assert Wanted(4681, STAGED * 8, 3_670_016, DEVICE).regions(64 * GIB) == [GIB // 2, 16 * GIB], (
        "with those on their way"
    )
    assert Wanted(32, 0, 7 * MIB, DEVICE).regions(64 * GIB) == [256 * MIB]
    assert Wanted(1, 0, 3 * MIB, DEVICE).regions(64 * GIB) == [4 * MIB]
    growing = Allocator()
    for _ in range(4681):
        growing.take(3_670_016)
    assert growing.taken > 31 * GIB, "page by page"


def test_no_more_is_pinned_than_there_is_room_for_on_all_devices() -> None:
    wanted = Wanted(4681, 96, 3_670_016, DEVICE * 2)
    assert sum(wanted.regions(33 * GIB)) == 16.5 * GIB
    assert wanted.regions(33 * GIB - 1) == [GIB // 4, 16 * GIB]
    assert wanted.regions(11 * GIB) == [GIB // 2, GIB, 4 * GIB]
    assert wanted.regions(UNIT) == wanted.regions(0) == []


def test_several_devices_get_what_they_need_from_one_allocator_too() -> None:
    wanted = Wanted(4681, 96, 3_670_016, DEVICE * 3)
    regions, allocator = wanted.regions(64 * GIB), Allocator()
    assert (
        allocator.pin([region for region in regions for _ in range(3)])
        <= 3 * sum(regions) + 16.5 * GIB
    )


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[jax.Array]:
    """Every array that is put anywhere."""
    found, put = list[jax.Array](), jax.device_put

    def noted(*given: Any, **named: Any) -> jax.Array:
        found.append(put(*given, **named))
        return found[-1]

    monkeypatch.setattr(jax, "device_put", noted)
    monkeypatch.setattr(HostRoom, "measure", staticmethod(lambda platform: HostRoom(8 * GIB)))
    return found


def test_regions_are_pinned_in_turn_for_each_device(puts: list[jax.Array]) -> None:
    devices, progress, work = jax.devices("cpu")[:2], list[tuple[int, int]](), Pinning()
    work.pin([MIB, 4 * MIB], devices, lambda done, total: progress.append((done, total)))
    assert [(array.nbytes, array.sharding.memory_kind, *array.devices()) for array in puts] == [
        (size, PINNED, device) for size in (MIB, 4 * MIB) for device in devices
    ]
    assert progress == [(done * MIB, 10 * MIB) for done in (1, 2, 6, 10)]
    assert work.size == 10 * MIB and work.rows == [("host memory pinned", "10.00 MiB")]
    assert Pinning().rows == []


def test_every_device_has_room_for_pages_of_the_stage_with_most_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 5}))
    wishes: dict[str, Any] = {"preemption_mode": "swap", "swap_space": 0.01}
    _, whole = wanted_of(str(tmp_path), **wishes)
    setup, wanted = wanted_of(str(tmp_path), pipeline_parallel_size=2, **wishes)
    assert [len(stage.layers(5)) for stage in stages(2)] == [3, 2] and setup.model.stage.is_last
    assert wanted.page == whole.page * 3 // 5 == setup.model.need.group_bytes


def wanted_of(tiny_dir: str, **wishes: Any) -> tuple[Decided, Wanted]:
    usual: dict[str, Any] = {
        "max_model_len": 128,
        "max_num_seqs": 4,
        "block_size": 8,
        "num_gpu_blocks_override": 96,
        "dtype": "float32",
    }
    setup = decide(
        EngineConfig(model=tiny_dir, **(usual | wishes)),
        tiny_dir,
        make_stage_meshes(
            wishes.get("tensor_parallel_size", 1), wishes.get("pipeline_parallel_size", 1)
        ),
    )
    return setup, Wanted.of(setup.model, setup.memory)


def test_a_page_counts_what_it_takes_on_one_device(tiny_dir: str) -> None:
    page = 2 * 2 * 2 * 8 * 8 * 4  # keys and values, layers, heads, tokens, numbers, bytes
    setup, plain = wanted_of(tiny_dir, preemption_mode="swap", swap_space=0.01)
    assert plain == Wanted(
        setup.resolved.host_pages,
        STAGED * setup.resolved.moved_pages,
        page,
        tuple(jax.devices("cpu")[:1]),
    )
    assert plain.pages == int(0.01 * GIB) // page
    _, split = wanted_of(tiny_dir, preemption_mode="swap", swap_space=0.01, tensor_parallel_size=2)
    assert (split.pages, split.page, split.devices) == (
        int(0.01 * GIB) // (page // 2),
        page // 2,
        tuple(jax.devices("cpu")[:2]),
    )
    _, narrow = wanted_of(tiny_dir, preemption_mode="swap", swap_space=0.01, kv_cache_dtype="fp8")
    assert narrow.page == (page // 4 + GRAIN) * 17 // 16, (
        "numbers; scales, fewer bytes than any array takes; and a part more"
    )


def failing_after(monkeypatch: pytest.MonkeyPatch, puts: list[jax.Array], error: Exception) -> None:
    """After two arrays there is no third."""
    put = jax.device_put

    def until_full(*given: Any) -> jax.Array:
        if len(puts) == 2:
            raise error
        return put(*given)

    monkeypatch.setattr(jax, "device_put", until_full)


@pytest.mark.parametrize(
    "error", [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no more"), MemoryError("no more")]
)
def test_an_engine_that_cannot_pin_all_says_so_and_goes_on(
    error: Exception,
    puts: list[jax.Array],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pin_host_memory, "UNIT", MIB)
    failing_after(monkeypatch, puts, error)
    report, work = Report(), Pinning()
    work.pin_wanted(Wanted(13, 1, MIB // 2, DEVICE), report)
    assert [array.nbytes for array in puts] == [MIB, 2 * MIB] and work.size == 3 * MIB
    (said,) = (record.getMessage() for record in caplog.records if record.name == "jaxllm")
    assert re.match(
        r"of 6\.50 MiB of host memory for KV pages, 3\.00 MiB could be pinned at start "
        r"\(.*no more\); the rest is .*",
        said,
    )
    assert said.endswith(GIVE_MEMORY) and PHASE in report.seconds


def test_what_others_took_meanwhile_is_not_pinned(
    puts: list[jax.Array], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pin_host_memory, "UNIT", MIB)
    room = iter([7 * MIB, 7 * MIB, 2 * MIB, 4 * MIB - 1])
    monkeypatch.setattr(pin_host_memory, "room_now", lambda: next(room))
    work = Pinning()
    work.pin_wanted(Wanted(7, 0, MIB, DEVICE), Report())
    assert [array.nbytes for array in puts] == [MIB, 2 * MIB]
    assert "3.00 MiB could be pinned at start; the rest" in caplog.text


def test_only_memory_for_pages_that_lie_there_is_missed(
    puts: list[jax.Array], caplog: pytest.LogCaptureFixture
) -> None:
    work = Pinning()
    work.pin_wanted(Wanted(16, 3, 2**16, DEVICE), Report())
    assert work.size == 2 * MIB and not caplog.records


def test_a_start_that_fails_begins_no_other_region(
    tiny_dir: str, puts: list[jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin_host_memory, "UNIT", MIB)
    monkeypatch.setattr(pin_host_memory, "PLATFORMS", ("cpu",))
    setup, wanted = wanted_of(tiny_dir, preemption_mode="swap", swap_space=0.012)
    assert len(wanted.regions(PLENTY)) > 1
    put, begun, works = jax.device_put, threading.Event(), list[Pinning]()

    def slow(*given: Any) -> jax.Array:
        begun.set()
        assert works[0].stop.wait(60)
        return put(*given)

    run = Pinning.pin_wanted
    monkeypatch.setattr(
        Pinning, "pin_wanted", lambda work, *given: (works.append(work), run(work, *given))
    )
    monkeypatch.setattr(jax, "device_put", slow)

    def starting() -> None:
        with pinning(setup.model, setup.memory, Report()):
            assert begun.wait(60)
            raise ConfigError("too large")

    with pytest.raises(ConfigError, match="too large"):
        starting()
    assert len(puts) == 1


def test_host_memory_is_pinned_before_pages_are_and_the_table_says_how_much(
    make_engine: Callable[..., Engine], puts: list[jax.Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_zeros = Zeros.__call__
    before = list[int]()

    def allocating(zeros: Zeros, like: Any) -> Any:
        if isinstance(like, tuple) and any(isinstance(arrays, PagedArrays) for arrays in like):
            pinned = (array for array in puts if array.sharding.memory_kind == PINNED)
            before.append(sum(array.nbytes for array in pinned))
        return make_zeros(zeros, like)

    monkeypatch.setattr(Zeros, "__call__", allocating)
    report = Kept()
    make_engine(report=report, preemption_mode="swap", swap_space=0.01)
    assert PHASE not in report.seconds and "host memory pinned" not in report.rows, (
        "on CPU pages lie in ordinary memory"
    )
    monkeypatch.setattr(pin_host_memory, "PLATFORMS", ("cpu",))
    report = Kept()
    make_engine(report=report)
    assert PHASE not in report.seconds, "there are no pages"
    make_engine(report=report, preemption_mode="swap", swap_space=0.01)
    assert before == [0, 0, 16 * MIB]
    assert report.rows["host memory pinned"] == "16.00 MiB" and PHASE.lower() in report.rows
