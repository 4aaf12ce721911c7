"""Prefill and decode apart: both legs of a router, what is counted, and a whole run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from benchmarks import apart, two_legs
from benchmarks.client import Call
from benchmarks.server import Server

ANSWER = {"kv_transfer_params": {"do_remote_prefill": True, "signature": "abc"}}
EVENTS = (
    b'data: {"choices": [{"text": "a"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1, '
    b'"prompt_tokens_details": {"cached_tokens": 2}}}\n\ndata: [DONE]\n\n'
)


@contextlib.asynccontextmanager
async def answering(reply: bytes, seen: list[tuple[str, dict[str, Any]]]) -> AsyncIterator[str]:
    """The URL of a server with one answer; `seen` gets each request's id and body."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = json.loads(await reader.readexactly(int(fields["content-length"])))
        seen.append((fields["x-request-id"], body))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + reply)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def test_the_second_leg_has_the_first_ones_answer_as_it_is_and_the_same_id():
    first: list[Any] = []
    second: list[Any] = []

    async def go() -> Call:
        async with (
            answering(json.dumps(ANSWER).encode(), first) as prefill,
            answering(EVENTS, second) as decode,
        ):
            router = two_legs.Router(prefill, decode, "m", 8)
            done = await router([5, 6, 7])
            assert router.offered.is_set() and not router.faults
            assert done.ttft >= router.legs[0], "the time counts from the first leg"
            return done

    done = asyncio.run(go())
    assert (done.error, done.cached_tokens, done.output_tokens) == ("", 2, 1)
    ((one, asked),) = first
    assert (asked["max_tokens"], asked["min_tokens"], "stream" in asked) == (1, 1, False)
    assert asked["kv_transfer_params"] == two_legs.FIRST_LEG
    ((other, asked),) = second
    assert asked["kv_transfer_params"] == ANSWER["kv_transfer_params"]
    assert (one, asked["max_tokens"], asked["stream"]) == (other, 8, True)


def test_a_first_leg_may_ask_for_an_answer_behind_its_last_page():
    first: list[Any] = []

    async def go() -> two_legs.Offer:
        async with answering(json.dumps(ANSWER).encode(), first) as prefill:
            return (await two_legs.Router(prefill, "", "m", 8).offer([5, 6, 7], 2))[0]

    assert asyncio.run(go()) == ANSWER["kv_transfer_params"]
    assert first[0][1]["max_tokens"] == first[0][1]["min_tokens"] == 2, (
        "one alone is answered early"
    )


def test_without_a_prefill_server_the_other_one_gets_the_request_alone():
    second: list[Any] = []

    async def go() -> two_legs.Router:
        async with answering(EVENTS, second) as decode:
            router = two_legs.Router("http://127.0.0.1:9", decode, "m", 1)
            assert (await router([5])).error == ""
            return router

    router = asyncio.run(go())
    assert len(router.faults) == 1 and not router.legs
    assert "kv_transfer_params" not in second[0][1]


@pytest.mark.parametrize(("cached", "pages", "ok"), [(32, 2, True), (16, 1, False), (32, 1, False)])
def test_pages_that_were_computed_again_show(cached, pages, ok, monkeypatch):
    async def send(ids: list[int]) -> Call:
        return Call(stamps=[1.0], cached_tokens=cached, prompt_tokens=len(ids))

    found = iter([16.0, 5.0, 5.0 + pages])
    monkeypatch.setattr(apart, "scraped", lambda url, pattern: next(found))
    fetched = apart.Fetched("", send)
    asyncio.run(fetched([0] * 48))
    row = fetched.row()
    assert (row["tokens_wanted"], row["pages_by_transfer"], row["ok"]) == (32, pages, ok)


def test_a_request_without_all_its_tokens_is_lost():
    assert apart.is_lost(Call(output_tokens=3), 8)
    assert apart.is_lost(Call(output_tokens=8, error="reset"), 8)
    assert not apart.is_lost(Call(output_tokens=8), 8)


def test_what_fails_or_does_not_end_is_a_figure_that_is_not_ok(monkeypatch, capsys):
    async def broken() -> None:
        raise SystemExit("a stream ended")

    bench = apart.Bench(apart.options().parse_args(["--limit", "0.01"]))
    assert asyncio.run(bench.attempt("one", asyncio.Event().wait())) is None
    assert asyncio.run(bench.attempt("two", broken())) is None
    assert asyncio.run(bench.attempt("three", asyncio.sleep(0, 5))) == 5
    assert bench.rows == [
        {"figure": "one", "error": "took more than 0.01 s; raise --limit", "ok": False},
        {"figure": "two", "error": "SystemExit: a stream ended", "ok": False},
    ]


def test_a_server_that_cannot_start_shows_its_log(tmp_path):
    with contextlib.closing(Server(["/no/such/model"], log=tmp_path / "log")) as server:
        with pytest.raises(SystemExit, match=r"(?s)before it was ready:.*no/such/model"):
            server.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_whole_run_fetches_every_page_and_loses_no_request(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    options = "--model demo --token-ids 300 700 --prompt-len 256 --streams 3 --input-len 24 "
    options += "--output-len 300 --settle 8 --host-gib 0.05 --repeat 1 --rounds 1"
    eager = ["--server-options", "--max-num-batched-tokens 64 --enforce-eager"]
    command = ["x", *options.split(), *eager, "--output-json", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    apart.main()
    rows = {row["figure"]: row for row in json.loads(out.read_text())["figures"]}
    assert rows["pages"]["ok"] and rows["pages"]["failed_first_legs"] == []
    # One prompt for the time and one before it; three beside the streams, in two rounds
    assert rows["pages"]["pages_by_transfer"] == (2 + 2 * 3) * 15
    alone = rows["ttft of a second leg alone"]
    assert alone["tokens"] == 256 and alone["ms"] > 0
    assert rows["prefill server killed"]["failed"] == 0
    assert rows["prefill server killed"]["ok"]
    assert rows["ttft, apart / alone"]["ratio"] > 0
    assert rows["equal first tokens"] == {
        "figure": "equal first tokens",
        "equal": 2,
        "of": 2,
        "ok": True,
    }
    assert rows["streams, alone"]["gap_ratio"] > 0
