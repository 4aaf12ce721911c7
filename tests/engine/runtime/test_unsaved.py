"""Copies to host memory that fail: what becomes of their pages, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.engine.engine import Engine
from jaxllm.engine.runtime import page_swapper
from jaxllm.engine.scheduling.plan import Moves, Traffic

MakeEngine = Callable[..., Engine]


class Unmade:
    """An array that was asked for, and for which there is no memory when it is made, or something
    else fails then."""

    def __init__(
        self, why: str = "RESOURCE_EXHAUSTED: Failed to allocate 1024 bytes of pinned memory"
    ):
        self.why = why

    def block_until_ready(self) -> None:
        raise jax.errors.JaxRuntimeError(self.why)

    def is_ready(self) -> bool:
        return True


@pytest.fixture(scope="module")
def swapping(make_engine: MakeEngine) -> Engine:
    return make_engine(num_gpu_blocks_override=20, preemption_mode="swap", swap_space=0.01)


@pytest.fixture
def swapper(swapping: Engine) -> page_swapper.PageSwapper:
    return page_swapper.PageSwapper(swapping.runner.programs, Traffic())


def moved(
    engine: Engine,
    swapper: page_swapper.PageSwapper,
    saves: Any = (),
    fetches: tuple[int, ...] = (),
    puts: Any = (),
) -> None:
    """The engine's pages after a plan's moves."""
    engine.runner.kv = swapper.run(engine.runner.kv, Moves(tuple(saves), fetches, tuple(puts)))


def test_a_plan_of_which_all_copies_fail_late_leaves_few_pages_on_the_device(
    swapping: Engine, swapper: page_swapper.PageSwapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = swapping.runner.shapes.moved_pages
    saves = [(page % 20, page) for page in range(8 * width)]
    most = 0

    def late(pages: tuple[Any, ...]) -> Any:
        nonlocal most
        most = max(most, len(swapper._leaving))
        return ((Unmade(),),) * len(pages)

    monkeypatch.setattr(swapper, "_to_host", late)
    moved(swapping, swapper, saves, fetches=(1,))
    assert most <= (page_swapper.LEAVING + 1) * width + 1, "one is still fetched"
    assert set(swapper._fetched) == {1}
    moved(swapping, swapper, puts=[(1, 1)])
    assert swapper.lost() == [place for _, place in saves], "all of them once"
    assert swapper.lost() == [] and not swapper._leaving and not swapper._kept


def test_a_place_that_is_saved_to_again_is_not_lost(
    swapping: Engine, swapper: page_swapper.PageSwapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(swapper, "_to_host", lambda pages: ((Unmade(),),) * len(pages))
        moved(swapping, swapper, [(3, 0), (4, 1)])
    assert swapper.traffic.saved == 0 and swapper._lost == {0, 1}
    moved(swapping, swapper, [(5, 1)])
    assert swapper.lost() == [0] and set(swapper._kept) == {1}


@pytest.mark.parametrize(
    ("copies", "pages", "said"),
    [
        ("RESOURCE_EXHAUSTED: pinned", None, page_swapper.NO_ROOM),
        ("INTERNAL: the link is down", None, page_swapper.NO_COPY),
        ("INTERNAL: an illegal address", "INTERNAL: an illegal address", page_swapper.NO_PAGES),
        ("RESOURCE_EXHAUSTED: device", "RESOURCE_EXHAUSTED: device", page_swapper.NO_PAGES),
    ],
)
def test_the_log_says_what_has_failed(
    swapper: page_swapper.PageSwapper,
    copies: str,
    pages: str | None,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    page: Any = (Unmade(pages) if pages else np.zeros(1),)
    for place in range(2):
        swapper._leaving[place] = page
        swapper._track(
            swapper._out, page_swapper.LEAVING, page_swapper._Trip((Unmade(copies),), {place: page})
        )
    assert swapper.lost() == [0, 1]
    assert [record.getMessage() for record in caplog.records if record.name == "jaxllm"] == [
        f"{said}: {copies}"
    ]


def test_a_program_that_failed_is_no_lack_of_host_memory(
    swapper: page_swapper.PageSwapper, caplog: pytest.LogCaptureFixture
) -> None:
    swapper._track(
        swapper._in,
        page_swapper.PLAN_LOADS,
        page_swapper._Trip(Unmade("RESOURCE_EXHAUSTED: device"), {}),
    )
    assert (
        swapper.lost() == []
        and page_swapper.NO_PAGES in caplog.text
        and page_swapper.NO_ROOM not in caplog.text
    )
