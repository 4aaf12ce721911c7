"""A server under load for as long as is asked for (`--soak-minutes`), whose clients leave at any
time and send nonsense: its memory stays flat, it compiles nothing, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.server.demo_server import Demo
from tests.server.memory import files, resident, tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

CLIENTS, LOOKS, QUARTER = 12, 40, 10
GROWTH = 1.05  # of the memory of the last quarter of looks, to that of the second
CANARY = {"prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0}
WORDS = "the quick brown fox jumps over lazy dog what is 27 + 58 sort these numbers 7 2 9".split()
NONSENSE: list[dict[str, Any]] = [
    {"prompt": [-1]},
    {"prompt": "a", "temperature": "hot"},
    {"prompt": "a " * 4000},
    {"prompt": "a", "guided_regex": "["},
    {"prompt": "a", "guided_json": {"type": "none"}},
    {},
]


def body(draw: random.Random) -> dict[str, Any]:
    """A request of any kind; one in ten is none."""
    if draw.random() < 0.1:
        return draw.choice(NONSENSE)
    made: dict[str, Any] = {
        "prompt": " ".join(draw.choices(WORDS, k=draw.randrange(1, 60))),
        "max_tokens": draw.randrange(1, 60),
        "temperature": draw.choice((0, 1)),
        "stream": draw.random() < 0.6,
    }
    options: list[dict[str, Any]] = [
        {"n": 3},
        {"logprobs": 5},
        {"guided_regex": f"[a-{draw.choice('bcdefgh')}]{{3,20}}"},
        {"guided_json": {"type": "object", "properties": {f"k{draw.randrange(500)}": {}}}},
        {"cache_salt": str(draw.randrange(50))},
        {"echo": True, "logprobs": 1},
        {"stop": ["fox", "7"]},
        {"frequency_penalty": 1, "logit_bias": {"5": 3}},
    ]
    return made | (draw.choice(options) if draw.random() < 0.5 else {})


async def one(port: int, draw: random.Random) -> None:
    """Send a request over a connection of its own. Half of the clients leave before the end, at any
    byte of what they send or hear."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps({"model": "demo"} | body(draw)).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
        whole = head + b"content-length: %d\r\n\r\n" % len(data) + data
        leaves = draw.random()
        if leaves < 0.1:
            writer.write(whole[: draw.randrange(len(whole))])
            await writer.drain()
        elif leaves < 0.5:
            writer.write(whole)
            async with asyncio.timeout(draw.random()):
                await reader.readexactly(draw.randrange(1, 5000))
        else:
            writer.write(whole)
            assert (await reader.read()).split()[1] in (b"200", b"400", b"503")
    except (TimeoutError, asyncio.IncompleteReadError):
        pass  # it had no more patience, or the reply was shorter
    finally:
        writer.transport.abort()


async def crowd(port: int, until: float, rate: float, seed: int) -> int:
    """CLIENTS clients, until a time, at so many requests a second; how many requests they sent."""

    async def client(number: int) -> int:
        draw, sent = random.Random(f"{seed} {number}"), 0
        while time.monotonic() < until:
            await asyncio.sleep(draw.expovariate(rate / CLIENTS))
            await one(port, draw)
            sent += 1
        return sent

    return sum(await asyncio.gather(*(client(number) for number in range(CLIENTS))))


class Look(NamedTuple):
    """At a server in which nothing runs."""

    sizes: list[int]  # resident bytes of each process
    files: int  # that they have open, together
    series: set[str]  # of metrics, with their labels
    canary: Any  # its choices


def idle(demo: Demo) -> Look:
    """A look, once nothing runs; no page is held then."""
    while demo.metric("vllm:num_requests_running") or demo.metric("vllm:num_requests_waiting"):
        pass  # each look is a round trip
    choices = demo.ask("/v1/completions", CANARY)["choices"]
    assert demo.metric("vllm:kv_cache_usage_perc") == 0
    processes = tree(demo.process.pid)
    return Look(
        [resident(each) for each in processes], sum(map(files, processes)), demo.series(), choices
    )


def test_a_server_under_load_stays_as_it_is(request: pytest.FixtureRequest) -> None:
    seconds = 60 * request.config.getoption("--soak-minutes")
    rate = request.config.getoption("--soak-rate")
    demo = Demo("--kv-offloading-size", "0.01")
    try:
        port, seen, sent = urlsplit(demo.url).port or 0, [], 0
        for number in range(LOOKS):
            pace = rate if number >= QUARTER else math.inf  # caches fill up before anything is held
            sent += asyncio.run(crowd(port, time.monotonic() + seconds / LOOKS, pace, number))
            seen.append(look := idle(demo))
            sizes = [size >> 20 for size in look.sizes]
            print(f"{sent} requests, {sizes} MiB, {look.files} files, {len(look.series)} series")
        assert_well(demo)
        settled = seen[QUARTER:]
        assert len({json.dumps(look.canary) for look in seen}) == 1, "the canary"
        assert len({len(look.sizes) for look in settled}) == 1, "processes"
        for sizes in zip(*(look.sizes for look in settled), strict=True):
            early, late = statistics.median(sizes[:QUARTER]), statistics.median(sizes[-QUARTER:])
            assert late <= GROWTH * early, sizes
        assert seen[-1].files <= settled[0].files + CLIENTS, [look.files for look in seen]
        assert not seen[-1].series - settled[0].series, "series of metrics"
        assert demo.stop() == 0
        assert "Traceback" not in demo.log
    finally:
        demo.close()


def assert_well(demo: Demo) -> None:
    """It is healthy, and nothing happened that should not."""
    assert demo.metric("jaxllm:compiles_after_warmup_total") == 0
    assert demo.metric("jaxllm:engine_step_failures_total") == 0
    assert demo.metric("jaxllm:self_check_failures_total") == 0
    assert demo.metric("jaxllm:engine_restarts_total") == 0
    assert demo.get("/health") == 200
