"""Serving: arrivals, a load on a real server with a fake engine, figures from known times, and a
client that survives servers."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from benchmarks import import_driver, report, serving, stall
from benchmarks.client import Call, call
from benchmarks.server import served
from jaxllm.tokenizer import Tokenizer
from tests.server.conftest import write_tokenizer
from tests.server.harness import Running


def arguments(*words: str):
    """Parsed options."""
    a = serving.options().parse_args(["--model", "fake", "--disable-tqdm", *words])
    a.goodput = serving.goals(a.goodput)
    return a


@pytest.fixture(scope="module")
def server():
    with Running(None) as running:
        yield running


def test_requests_arrive_at_the_rate_and_are_the_same_for_the_same_seed():
    a = arguments(
        "--num-prompts",
        "200",
        "--request-rate",
        "50",
        "--random-input-len",
        "10",
        "--random-output-len",
        "4",
    )
    found = serving.jobs(a)
    times = [at for at, _ in found]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4.0)
    assert found == serving.jobs(a)
    assert {(len(body["prompt"]), body["max_tokens"]) for _, body in found} == {(10, 4)}


def test_burstier_arrivals_have_more_uneven_gaps():
    def spread(burstiness: str) -> float:
        found = serving.jobs(
            arguments("--num-prompts", "300", "--request-rate", "10", "--burstiness", burstiness)
        )
        return float(np.diff([at for at, _ in found]).std())

    assert spread("0.2") > spread("1") > spread("20")


def test_without_a_rate_all_requests_start_at_once_with_lengths_within_the_ratio():
    found = serving.jobs(
        arguments(
            "--num-prompts", "300", "--random-input-len", "100", "--random-range-ratio", "0.5"
        )
    )
    assert {at for at, _ in found} == {0.0}
    lengths = {len(body["prompt"]) for _, body in found}
    assert min(lengths) >= 50 and max(lengths) <= 150 and len(lengths) > 30


def test_figures_follow_from_the_times_of_the_events():
    one = Call(begin=10.0, stamps=[10.1, 10.2, 10.4], prompt_tokens=5, output_tokens=4)
    two = Call(begin=11.0, stamps=[11.3], prompt_tokens=7, output_tokens=1)
    lost = Call(begin=11.0, error="gone")
    found = serving.figures(
        [one, two, lost],
        arguments("--goodput", "ttft:150", "tpot:120", "--metric-percentiles", "50,100"),
    )
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, ["gone"])
    assert found["duration"] == pytest.approx(1.3)
    assert found["output_throughput"] == pytest.approx(5 / 1.3, abs=0.1)
    assert found["total_token_throughput"] == pytest.approx(17 / 1.3, abs=0.1)
    assert found["request_goodput"] == pytest.approx(1 / 1.3, abs=1e-3)  # the second is late
    assert (found["mean_ttft_ms"], found["p100_ttft_ms"]) == (200.0, 300.0)
    assert found["median_tpot_ms"] == 100.0  # 300 ms over three tokens; one token has none
    assert (found["mean_itl_ms"], found["std_itl_ms"]) == (150.0, 50.0)
    assert found["p100_e2el_ms"] == 400.0


def test_a_load_on_a_server_comes_back_complete(server, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    load = [
        "--num-prompts",
        "12",
        "--max-concurrency",
        "3",
        "--random-input-len",
        "20",
        "--random-output-len",
        "6",
        "--token-ids",
        "0",
        "256",
    ]
    where = [
        "--base-url",
        server.url,
        "--token-ids",
        "0",
        "256",
        "--processes",
        "2",
        "--ignore-eos",
        "--disable-tqdm",
        "--device",
        "Card X",
        "--api-key",
        "secret",
    ]
    monkeypatch.setattr(sys, "argv", ["serving", *load, *where, "--output-json", str(out)])
    serving.main()
    record = json.loads(out.read_text())
    found = record["figures"]
    assert (found["completed"], found["failed"]) == (12, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (240, 72)
    assert found["p99_ttft_ms"] >= found["median_ttft_ms"] > 0
    assert record["arguments"]["model"] == "fake"  # the server's own name for it
    assert record["machine"]["devices"] == [{"kind": "Card X"}]
    assert "secret" not in out.read_text()


def test_chats_are_measured_too(tmp_path):
    with Running(Tokenizer.load(write_tokenizer(tmp_path))) as server:
        load = [
            "--num-prompts",
            "3",
            "--random-input-len",
            "4",
            "--random-output-len",
            "5",
            "--token-ids",
            "0",
            "9",
            "--ignore-eos",
        ]
        a = arguments(
            *load,
            "--base-url",
            server.url,
            "--processes",
            "1",
            "--endpoint",
            "/v1/chat/completions",
        )
        found = serving.figures(serving.run(a, serving.jobs(a)), a)
    assert (found["completed"], found["total_output_tokens"]) == (3, 15)


def test_requests_that_the_server_refuses_are_counted_and_its_words_kept(server):
    a = arguments(
        "--num-prompts",
        "2",
        "--random-input-len",
        "400",
        "--token-ids",
        "0",
        "256",
        "--base-url",
        server.url,
        "--processes",
        "1",
    )
    with pytest.raises(
        SystemExit, match=r"every request failed; the first: Refused: 400 .*context_length"
    ):
        serving.figures(serving.run(a, serving.jobs(a)), a)


def test_a_vocabulary_that_is_smaller_than_the_ids_of_prompts_is_told_of_the_option(server):
    few = ("--num-prompts", "1", "--random-input-len", "8", "--processes", "1")
    a = arguments(*few, "--base-url", server.url)
    with pytest.raises(SystemExit, match=r"outside the vocabulary.*--token-ids LOW HIGH"):
        serving.figures(serving.run(a, serving.jobs(a)), a)


def test_only_a_load_that_is_compared_can_be_imported(tmp_path):
    asked = vars(
        arguments(
            "--num-prompts",
            "400",
            "--request-rate",
            "20",
            "--random-input-len",
            "512",
            "--random-output-len",
            "128",
        )
    )
    figures = {"output_throughput": 9.0} | {
        f"{q}_{name}_ms": 3.0 for q in ("p50", "p99") for name in ("ttft", "tpot", "itl")
    }
    record = {
        "benchmark": "serving",
        "date": "2026-01-02",
        "arguments": asked | {"model": "/tmp/qwen"},
        "figures": figures,
    }
    path = tmp_path / "out.json"
    path.write_text(json.dumps(record, indent=1, default=str))
    rows = list(import_driver.read(path, "never"))
    assert {(row["shape"], row["rate"], row["value"], row["date"]) for row in rows} == {
        ("qwen", 20.0, 3.0, "2026-01-02")
    }
    assert len(rows) == 4
    path.write_text(
        json.dumps(record | {"arguments": asked | {"random_output_len": 64}}, indent=1, default=str)
    )
    with pytest.raises(SystemExit, match="not compared"):
        list(import_driver.read(path, "never"))


def test_goals_that_cannot_be_are_refused():
    with pytest.raises(SystemExit, match="pairs such as"):
        serving.goals(["ttft"])
    with pytest.raises(SystemExit, match="not itl"):
        serving.goals(["itl:3"])


type Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def against(handler: Handler, body: dict) -> Call:
    """One call to a server that `handler` is; it writes the reply after the request was read."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        await handler(reader, writer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await call(f"http://127.0.0.1:{port}/v1/completions", body, {})


EVENTS = (
    b'data: {"choices": [{"text": "a"}]}\n\n: a comment\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def test_events_may_be_cut_anywhere():
    async def handler(reader, writer):
        data = EVENTS + b"data: [DONE]\n\n"
        writer.write(
            HEAD
            + b"".join(b"5\r\n" + data[at : at + 5] + b"\r\n" for at in range(0, len(data) - 5, 5))
        )

    found = asyncio.run(against(handler, {}))
    assert (found.error, len(found.stamps), found.prompt_tokens, found.output_tokens) == (
        "",
        1,
        3,
        1,
    )


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (HEAD + b"20\r\ndata:", "IncompleteReadError"),
        (HEAD + b"not a size\r\n", "ValueError"),
        (b"HTTP/1.1 503 busy\r\ncontent-length: 4\r\n\r\nwait", "Refused: 503 wait"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n", "Refused: the stream ended without a token"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {"message": "broken"}}\n\n', "Refused: broken"),
        (b"", "IncompleteReadError"),
    ],
)
def test_whatever_a_server_does_is_an_error_of_that_request_alone(reply, error):
    async def handler(reader, writer):
        writer.write(reply)

    assert asyncio.run(against(handler, {})).error.startswith(error)


def test_gaps_count_that_overlap_the_wait_for_the_long_prompt():
    streams = [Call(stamps=[0.0, 0.01, 0.03, 0.2, 0.21]), Call(stamps=[0.0, 0.02, 0.04, 0.9])]
    found = stall.figures(streams, [Call(begin=0.035, stamps=[0.15])])
    assert found == {
        "stall_ms": 860.0,
        "stall_at_ms": 5.0,
        "median_itl_ms": 20.0,
        "worst_itl_before_ms": 20.0,
        "prompt_ttft_ms": 115.0,
    }
    assert (
        stall.figures(
            [Call(stamps=[0.0, 0.01, 0.03, 0.2, 0.9])], [Call(begin=0.035, stamps=[0.15])]
        )["stall_ms"]
        == 170.0
    )


def endless(first: int):
    """A server whose streams never end, and whose request for one token waits for `first` turns of
    the loop."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = json.loads(
            await reader.readexactly(
                int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            )
        )
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(first if body["max_tokens"] == 1 else 0):
            await asyncio.sleep(0)
        try:
            while not writer.is_closing():
                writer.write(b'data: {"choices": [{}]}\n\n')
                await writer.drain()
                await asyncio.sleep(0)
                if body["max_tokens"] == 1:
                    writer.write(b"data: [DONE]\n\n")
                    break
        except ConnectionError:
            pass
        writer.close()

    return serve


def test_a_round_sends_the_long_prompt_among_running_streams_and_ends_them():
    async def go() -> dict:
        async with await asyncio.start_server(endless(50), "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
            return await stall.Round(url, {}, "m", 3, 5).run([[1], [2], [3]], [[4] * 9], 1000)

    found = asyncio.run(go())
    assert found["stall_ms"] > 0 and found["prompt_ttft_ms"] > 0


def test_a_round_whose_streams_end_early_says_so():
    async def handler(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + EVENTS)
        writer.close()

    async def go() -> None:
        async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
            await stall.Round(url, {}, "m", 2, 5).run([[1], [2]], [[3]], 10)

    with pytest.raises(SystemExit, match="ended before"):
        asyncio.run(go())


def test_a_server_that_ends_before_it_is_ready_ends_the_benchmark():
    with pytest.raises(SystemExit, match="before it was ready"):
        with served("/no/such/model", ""):
            pass


@pytest.mark.slow
def test_a_server_of_a_shape_is_started_measured_and_ended(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    small = "--max-num-seqs 4 --max-num-batched-tokens 64 --max-model-len 512 --enforce-eager"
    load = [
        "--num-prompts",
        "8",
        "--request-rate",
        "50",
        "--random-input-len",
        "24",
        "--random-output-len",
        "8",
        "--token-ids",
        "3",
        "2000",
    ]
    more = ["--ignore-eos", "--disable-tqdm", "--processes", "2", "--output-json", str(out)]
    monkeypatch.setattr(sys, "argv", ["serving", "--serve", f"shape:tiny {small}", *load, *more])
    serving.main()
    record = json.loads(out.read_text())
    assert (record["figures"]["completed"], record["figures"]["total_output_tokens"]) == (8, 64)
    assert record["figures"]["server_ready_s"] > 0
    assert report.table("serving", [record]).splitlines()[-1].startswith("| tiny | ")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(record["arguments"]["base_url"], timeout=5)
