"""The exchange between devices, emulated: sums are right in any order of events, a peer that stops
ends the waiting, and each precaution is needed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pallas_kernels.all_reduce.group import Layout
from tests.pallas_kernels.exchange_machine import (
    MASK,
    NEVER,
    Exchange,
    Kernel,
    World,
    one_shot,
    run,
    sane,
    two_shot,
)

FOREVER = 10**9  # polls
PATIENT = 2000
LANES = (0, 77)


def layout(devices: int, words: int) -> Layout:
    return Layout(devices, 512 * words, one_shot=3, two_shot=3 if devices > 2 else 0)


def kernels(rng: random.Random, devices: int, words: int, count: int) -> list[Kernel]:
    """Launches of either kind and of different numbers of rows; some words are `NEVER`."""
    found = []
    for _ in range(count):
        exchange: Exchange = rng.choice([one_shot, two_shot] if devices > 2 else [one_shot])
        rows, lanes = rng.randint(1, 3 if devices < 8 else 2), LANES[: 2 if devices == 2 else 1]
        parts = {
            (d, row, lane): [rng.choice([NEVER, 0, rng.getrandbits(32)]) for _ in range(words)]
            for d in range(devices)
            for row in range(rows)
            for lane in lanes
        }
        found.append(Kernel(exchange, parts, rows, lanes))
    return found


def wanted(kernel: Kernel, devices: int, row: int, lane: int) -> list[int]:
    sums = zip(*(map(sane, kernel.parts[d, row, lane]) for d in range(devices)), strict=True)
    return [sane(sum(words) & MASK) for words in sums]


def assert_right(world: World, launched: list[Kernel]) -> None:
    for device in run(world, launched):
        for kernel, found in zip(launched, device.results, strict=True):
            assert len(found) == kernel.rows * len(kernel.lanes)
            for (row, lane), words in found.items():
                assert [*map(sane, words)] == wanted(kernel, world.devices, row, lane)
    assert world.gave_up() == [0] * world.devices


def exchanges(devices: int, seed: int, texts: Callable[[str], str] = lambda text: text) -> None:
    """Some launches after one another, of which all sums must be right."""
    rng = random.Random(f"{devices} {seed}")
    words = rng.choice([1, 2, 4])
    world = World(layout(devices, words), FOREVER, rng, texts)
    assert_right(world, kernels(rng, devices, words, count=6 if devices < 8 else 3))


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_every_order_of_events_gives_the_right_sums(devices: int, seed: int) -> None:
    exchanges(devices, seed)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_hundreds_of_orders_of_events_give_the_right_sums(devices: int) -> None:
    for seed in range(100, 100 + 1200 // devices**2 + 20):
        exchanges(devices, seed)


@pytest.mark.parametrize(
    ("devices", "kind"),
    [(2, one_shot), (4, one_shot), (4, two_shot)],
    ids=["two", "four, one-shot", "four, two-shot"],
)
def test_a_peer_that_stops_ends_the_waiting_with_an_error(devices: int, kind: Exchange) -> None:
    rng, polls = random.Random(devices), 20
    world = World(layout(devices, 2), polls, rng)
    launched = [k for k in kernels(rng, devices, 2, 40) if k.exchange is kind][:6]
    # The last device does some exchanges, then nothing more
    *others, _ = run(world, launched, stops={devices - 1: 300})
    assert all(device.is_done for device in others)
    assert world.gave_up()[:-1] == [1] * (devices - 1)
    # Threads that wait at once wait at most once, and those that come later not at all
    waits = 3 * len(LANES) * (devices - 1) * len(launched)
    assert world.polled < polls * waits


def test_inboxes_that_are_filled_anew_serve_again() -> None:
    rng = random.Random(5)
    world = World(layout(4, 2), 3, rng)
    run(world, kernels(rng, 4, 2, 4), stops={0: 200})
    assert 1 in world.gave_up()
    world.polls = FOREVER
    world.fill()
    assert_right(world, kernels(rng, 4, 2, 5))


@pytest.mark.parametrize(
    ("precaution", "without"),
    [
        ("and.b32 $0, count, 1;", "mov.b32 $0, 0;"),  # two places in turn
        ("selp.b32 s0, 0, $4, p;", "mov.b32 s0, $4;"),  # NEVER goes as 0
        ("{never", "{lane"),  # NEVER is put back
        ("setp.eq.or.b32 p, o1, 0x80000000, p;", "mov.b32 lane, 0;"),  # all words are awaited
    ],
    ids=["two places", "no NEVER is sent", "NEVER is put back", "every word is awaited"],
)
def test_without_one_precaution_some_order_of_events_fails(precaution: str, without: str) -> None:
    def broken(text: str) -> str:
        return text.replace(precaution, without)

    def is_right(seed: int, texts: Callable[[str], str]) -> bool:
        rng = random.Random(seed)
        world = World(layout(2, 2), PATIENT, rng, texts)
        try:
            assert_right(world, kernels(rng, 2, 2, count=6))
        except AssertionError:
            return False
        return True

    failing = next(seed for seed in range(100) if not is_right(seed, broken))
    assert is_right(failing, lambda text: text)


def test_words_lie_apart_for_all_rows_places_and_senders() -> None:
    """No two of a device's words share an address, whatever the exchange."""
    from pallas_kernels.all_reduce.protocol import Region

    for sizes in (Layout(2, 1024, 5), Layout(4, 512, 3, 9), Layout(8, 1536, 2, 8)):
        spans = [(0, sizes.header)]
        one, share, whole = (make(sizes) for make in (Region.one_shot, Region.parts, Region.totals))
        regions = [(one, sizes.one_shot, sizes.slots)]
        for counters, record, rows in (
            (sizes.header, sizes.one_shot_record, sizes.one_shot),
            (sizes.totals, sizes.total_record, sizes.two_shot),
        ):
            spans += [(counters + r * record, sizes.counters) for r in range(rows)]
        if sizes.two_shot:
            shares = -(-sizes.two_shot // sizes.devices)
            regions += [(share, shares, sizes.devices), (whole, sizes.two_shot, 1)]
        for region, rows, slots in regions:
            for r in range(rows):
                for place in range(2):
                    for slot in range(slots):
                        at = region.start + r * region.record + place * region.place
                        spans.append((at + slot * region.slot, sizes.row))
        spans.sort()
        ends = [start + length for start, length in spans]
        assert all(end <= start for end, (start, _) in zip(ends, spans[1:], strict=False))
        assert ends[-1] == sizes.size
        assert all(start % 16 == 0 for start, _ in spans)
