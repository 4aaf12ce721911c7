"""Prefill and decode apart, on two devices, beside one ordinary engine on one of them.

    python -m benchmarks.apart --model shape:llama-3.1-8b

Two servers: one computes prompts, the other continues them, and requests take both legs, as vLLM's
routers send them. Then the first one is killed while prompts arrive. At last an ordinary server
alone. A line for each figure as it is found, times in ms; the exit status is 1 when one is not ok:

- TTFT of a long prompt, from the start of the first leg to the first streamed token: at most
  `TTFT_BOUND` times that of the ordinary server (medians of `--repeat`). The first leg is answered
  when the prompt begins to be computed, so that pages travel meanwhile (`answer_early`).
- TTFT of the second leg alone, of a short and of a long prompt whose pages are computed: what both
  need besides computing, and how much of it is the pages'.
- The worst gap of running streams while `--arrivals` long prompts arrive one after another, `stall`
  has how: at most `GAP_BOUND` times their median gap.
- Tokens whose pages came by transfer, by the usage that clients are told and by the server's count
  of pages: all whole pages but that of the last token.
- Requests that fail when the prefill server is killed: none.
- First tokens of the prompts for the TTFT, equal to those of the ordinary server: more than half,
  for 16-bit numbers that are computed in other chunks decide near ties otherwise.

Prompts are random ids, and none comes twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import secrets
import shlex
import shutil
import statistics
import tempfile
import urllib.request
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from benchmarks.client import Call, asked, call, first_model, said
from benchmarks.record import finish, host, parser
from benchmarks.server import Server, words_of
from benchmarks.stall import Round, Send
from benchmarks.two_legs import PATH, Router

TTFT_BOUND, GAP_BOUND = 1.2, 2.0
WARM = 1  # long prompts and rounds that are not counted
HELD, FLYING, AFTER = 2, 4, 2  # requests around the death of a server


class Bench:
    """The figures, and the prompts for them."""

    def __init__(self, a: argparse.Namespace):
        self.a, self.rng = a, random.Random(a.seed)
        self.machine, self.rows = host(), list[dict[str, Any]]()
        self.timed = self.longs(WARM + a.repeat)  # prompts for the TTFT, the same for all servers
        self.began: dict[str, list[str]] = {}  # with what their answers began

    def report(self, figure: str, **row: Any) -> None:
        """Print a figure at once, and write what is known so far."""
        self.rows.append({"figure": figure} | row)
        print(json.dumps(self.rows[-1]), flush=True)
        finish("apart", self.a, self.rows, self.machine)

    async def attempt[T](
        self, what: str, work: Coroutine[Any, Any, T], *servers: Server
    ) -> T | None:
        """The work's result; None when it fails or takes longer than `--limit`, which is a figure
        that is not ok, so that the others are measured all the same. The ends of the servers' logs
        are shown then."""
        try:
            return await asyncio.wait_for(work, self.a.limit)
        except TimeoutError:
            fault = f"took more than {self.a.limit:g} s; raise --limit"
        except (Exception, SystemExit) as error:  # whatever a server does
            fault = said(error)
        for server in servers:
            print(f"{server.log}{server.tail()}", flush=True)
        self.report(what, error=fault, ok=False)
        return None

    def bounded(self, figure: str, value: float, bound: float) -> None:
        """Report a ratio that has a bound."""
        self.report(figure, ratio=round(value, 3), bound=bound, ok=value <= bound)

    def prompt(self, tokens: int) -> list[int]:
        """Random ids that no server has seen."""
        return [self.rng.randrange(*self.a.token_ids) for _ in range(tokens)]

    def longs(self, count: int) -> list[list[int]]:
        """Long prompts."""
        return [self.prompt(self.a.prompt_len) for _ in range(count)]

    async def ttft(self, who: str, send: Send) -> float:
        """The median over prompts that arrive while nothing else runs. Raises SystemExit when one
        fails."""
        found, self.began[who] = list[float](), list[str]()
        for ids in self.timed:
            done = await send(ids)
            if done.error:
                raise SystemExit(f"a request failed: {done.error}")
            found.append(round(done.ttft * 1e3, 2))
            self.began[who].append(done.first_text)
        middle = round(statistics.median(found[WARM:]), 2)
        self.report(f"ttft, {who}", ms=middle, all_ms=found[WARM:])
        return middle

    async def second_legs(self, router: Router, tokens: int) -> None:
        """Report the TTFT of second legs whose pages are computed, so that none is waited for.
        Raises SystemExit when one fails."""
        found = list[float]()
        for _ in range(WARM + self.a.repeat):
            ids = self.prompt(tokens)
            done = await router.continued(ids, *await router.offer(ids, 2))
            if done.error:
                raise SystemExit(f"a request failed: {done.error}")
            found.append(round(done.ttft * 1e3, 2))
        middle = round(statistics.median(found[WARM:]), 2)
        self.report("ttft of a second leg alone", tokens=tokens, ms=middle, all_ms=found[WARM:])

    async def gaps(self, who: str, url: str, model: str, send: Send) -> float:
        """The worst gap of streams at `url` while long prompts arrive, of `--rounds` rounds, in
        median gaps."""
        a, rounds = self.a, []
        for _ in range(WARM + a.rounds):
            prompts = [self.prompt(a.input_len) for _ in range(a.streams)]
            one = Round(url + PATH, {}, model, a.streams, a.settle, send)
            rounds.append(await one.run(prompts, self.longs(a.arrivals), a.output_len))
        worst = max(rounds[WARM:], key=lambda each: each["stall_ms"])
        ratio = worst["stall_ms"] / worst["median_itl_ms"]
        self.report(f"streams, {who}", streams=a.streams, **worst, gap_ratio=round(ratio, 3))
        return ratio


def ordinary(url: str, model: str, output: int) -> Send:
    """Sends a request to one server."""
    return lambda ids: call(url + PATH, asked(model, ids, output), {})


class Fetched:
    """What a decode server has fetched since this was made."""

    def __init__(self, url: str, send: Send):
        self.url, self._send = url, send
        self.page = int(scraped(url, r'vllm:cache_config_info\{.*block_size="(\d+)"'))
        self.loaded = scraped(url, LOADED)
        self.requests = self.cached = self.wanted = 0

    async def __call__(self, ids: list[int]) -> Call:
        """Send a request and count its tokens."""
        done = await self._send(ids)
        self.requests += 1
        self.cached += done.cached_tokens
        self.wanted += whole_pages(len(ids), self.page)
        return done

    def row(self) -> dict[str, Any]:
        """The counts. Not ok unless every page was fetched that could be."""
        pages = int(scraped(self.url, LOADED) - self.loaded)
        return {
            "requests": self.requests,
            "pages_by_transfer": pages,
            "tokens_by_transfer": self.cached,
            "tokens_wanted": self.wanted,
            "ok": self.cached == self.wanted == pages * self.page,
        }


LOADED = r"jaxllm:pages_loaded_total\{.*\} (\S+)"


def scraped(url: str, pattern: str) -> float:
    """A number of /metrics. Raises SystemExit where there is none."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    if (found := re.search(pattern, text)) is None:
        raise SystemExit(f"{url}/metrics has no {pattern}")
    return float(found[1])


def whole_pages(tokens: int, page: int) -> int:
    """Tokens of a prompt that can be fetched: its last one is always computed."""
    return (tokens - 1) // page * page


async def killed(bench: Bench, router: Router, prefill: Server, page: int) -> None:
    """Kill the prefill server while prompts arrive: some have its offer and no second leg yet, one
    is being fetched, some are being computed, and some come later."""
    held = [(ids, *await router.offer(ids)) for ids in bench.longs(HELD)]
    faults = len(router.faults)
    router.offered.clear()
    flying = [asyncio.create_task(router(ids)) for ids in bench.longs(FLYING)]
    await router.offered.wait()
    await asyncio.to_thread(prefill.kill)
    calls = await asyncio.gather(
        *flying,
        *(router.continued(*leg) for leg in held),
        *(router(ids) for ids in bench.longs(AFTER)),
    )
    errors = [done.error or "too few tokens" for done in calls if is_lost(done, router.output)]
    again = sum(done.cached_tokens < whole_pages(bench.a.prompt_len, page) for done in calls)
    slowest = max((done.ttft for done in calls if done.stamps), default=0.0)
    bench.report(
        "prefill server killed",
        requests=len(calls),
        failed=len(errors),
        errors=sorted(set(errors)),
        failed_first_legs=len(router.faults) - faults,
        computed_by_decode=again,
        worst_ttft_ms=round(slowest * 1e3, 2),
        ok=not errors and again >= HELD + AFTER,
    )


def is_lost(done: Call, output: int) -> bool:
    """Whether a request did not get all its tokens."""
    return bool(done.error) or done.output_tokens != output


async def measure_apart(bench: Bench, prefill: Server, decode: Server) -> float | None:
    """All figures of the two servers; the TTFT in ms, None where there is none."""
    both, model = (prefill, decode), first_model(decode.url, {})
    router = Router(prefill.url, decode.url, model, bench.a.long_output_len)
    for tokens in (bench.a.input_len, bench.a.prompt_len):
        legs_alone = bench.second_legs(router, tokens)
        await bench.attempt("ttft of a second leg alone", legs_alone, *both)
    router.legs.clear()
    fetched = Fetched(decode.url, router)
    ttft = await bench.attempt("ttft, apart", bench.ttft("apart", fetched), *both)
    if legs := router.legs[WARM:]:
        bench.report("first leg", ms=round(statistics.median(legs) * 1e3, 2))
    streams = bench.gaps("apart", decode.url, model, fetched)
    ratio = await bench.attempt("streams, apart", streams, *both)
    if ratio is not None:
        bench.bounded("worst gap / median gap, apart", ratio, GAP_BOUND)
    bench.report("pages", **fetched.row(), failed_first_legs=list(router.faults))
    around = killed(bench, router, prefill, fetched.page)
    await bench.attempt("prefill server killed", around, *both)
    return ttft


async def measure_alone(bench: Bench, server: Server) -> float | None:
    """All figures of the ordinary server; the TTFT in ms, None where there is none."""
    model = first_model(server.url, {})
    send = ordinary(server.url, model, bench.a.long_output_len)
    ttft = await bench.attempt("ttft, alone", bench.ttft("alone", send), server)
    streams = bench.gaps("alone", server.url, model, send)
    await bench.attempt("streams, alone", streams, server)
    return ttft


class Starter:
    """Starts servers of one model, whose logs are in a folder."""

    def __init__(self, a: argparse.Namespace, folder: Path):
        self.a, self.logs = a, a.logs or folder
        self.logs.mkdir(parents=True, exist_ok=True)
        self._key = folder / "key"
        self._key.write_text(secrets.token_hex(32))
        longest = max(a.prompt_len + a.long_output_len, a.input_len + a.output_len)
        self._words = [
            *words_of(f"{a.model} {a.server_options}", folder),
            *("--max-model-len", str(longest), "--max-num-seqs", str(2 * a.streams)),
        ]

    def __call__(self, name: str, gpu: str, *words: str) -> Server:
        """A server that sees one GPU."""
        log = self.logs / f"{name}.log"
        return Server([*self._words, *words], {"CUDA_VISIBLE_DEVICES": gpu}, log)

    def half(self, role: str) -> list[str]:
        """The words of one that computes prompts or continues them."""
        config = {
            "kv_role": role,
            "kv_port": 0,
            "kv_buffer_size": int(self.a.host_gib * 2**30),
            "kv_connector_extra_config": {
                "key_file": str(self._key),
                "answer_early": self.a.answer_early,
            },
        }
        size = str(self.a.host_gib)
        return ["--kv-offloading-size", size, "--kv-transfer-config", json.dumps(config)]


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Ends servers in any case; when the measurement fails, the ends of their logs are shown."""
    try:
        yield
    except BaseException:
        for server in servers:
            print(f"{server.log}{server.tail()}", flush=True)
        raise
    finally:
        for server in servers:
            server.close()


def run(bench: Bench, start: Starter) -> None:
    """All servers and figures, in the order of the least waiting."""
    a = bench.a
    bench.report("shared memory", free_mib=free_mib(Path("/dev/shm")))
    words = shlex.split(a.prefill_options)
    prefill = start("prefill", a.gpus[0], *start.half("kv_producer"), *words)
    decode = start("decode", a.gpus[1], *start.half("kv_consumer"))
    with running(prefill, decode):
        bench.report("start, prefill server", seconds=prefill.wait(a.start_limit))
        bench.report("start, decode server", seconds=decode.wait(a.start_limit))
        apart = asyncio.run(measure_apart(bench, prefill, decode))
    server = start("ordinary", a.gpus[0])
    with running(server):
        bench.report("start, ordinary server", seconds=server.wait(a.start_limit))
        alone = asyncio.run(measure_alone(bench, server))
    if apart is not None and alone is not None:
        bench.bounded("ttft, apart / alone", apart / alone, TTFT_BOUND)
        equal = sum(map(str.__eq__, bench.began["apart"], bench.began["alone"]))
        prompts = len(bench.timed)
        bench.report("equal first tokens", equal=equal, of=prompts, ok=equal * 2 > prompts)


def free_mib(folder: Path) -> int:
    """MiB that a file there may take. Each connection of a transfer wants 32 in shared memory and
    takes TCP where there is less."""
    return shutil.disk_usage(folder).free >> 20 if folder.is_dir() else 0


def options() -> argparse.ArgumentParser:
    """The command line."""
    args = parser(__doc__ or "")
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    args.add_argument("--gpus", nargs=2, default=visible[:2], help="of prefill and of decode")
    args.add_argument("--server-options", default="", help="of every server, as one text")
    args.add_argument(
        "--prefill-options",
        default="",
        help="of the server that computes prompts; pages of a step travel while the next one runs,"
        " by default of 2,048 tokens and less at a prompt's end",
    )
    args.add_argument(
        "--answer-early",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="first legs are answered when their prompt begins to be computed",
    )
    args.add_argument(
        "--host-gib",
        type=float,
        default=8.0,
        help="GiB of host memory for pages: of each server, and of the prefill server's shelf",
    )
    args.add_argument("--token-ids", type=int, nargs=2, default=(1000, 100_000))
    args.add_argument("--prompt-len", type=int, default=8192, help="tokens of a long prompt")
    args.add_argument("--long-output-len", type=int, default=8, help="tokens that it asks for")
    args.add_argument("--repeat", type=int, default=5, help="long prompts for the TTFT")
    args.add_argument("--streams", type=int, default=16)
    args.add_argument("--input-len", type=int, default=512, help="tokens of a stream's prompt")
    args.add_argument("--output-len", type=int, default=4096, help="that a stream would send")
    args.add_argument("--settle", type=int, default=64, help="events before prompts arrive")
    args.add_argument("--arrivals", type=int, default=3, help="long prompts beside streams")
    args.add_argument("--rounds", type=int, default=2)
    args.add_argument("--limit", type=float, default=90.0, help="seconds of one measurement")
    args.add_argument("--start-limit", type=float, default=300.0, help="seconds of a start")
    args.add_argument("--logs", type=Path, help="folder for what the servers write")
    return args


def main() -> int:
    """Measure and report; 1 when a figure is not ok."""
    a = options().parse_args()
    bench = Bench(a)
    with tempfile.TemporaryDirectory() as folder:
        run(bench, Starter(a, Path(folder)))
    return int(any(row.get("ok") is False for row in bench.rows))


if __name__ == "__main__":
    raise SystemExit(main())
