"""How long running streams wait while a long prompt arrives: the worst gap between two tokens of
any of them.

    python -m jaxllm.server --model DIR --load-format dummy &
    python -m benchmarks.stall --base-url http://127.0.0.1:8000

Streams run until each has sent `--settle` events; then the long prompt is sent, and gaps count that
overlap the time from there to its first token. The worst of `--repeat` rounds, each with prompts of
its own.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from benchmarks.client import Call, asked, call, client_parser, first_model, key_header
from benchmarks.record import finish, host
from benchmarks.server import served

type Send = Callable[[list[int]], Awaitable[Call]]


class Round:
    """One round: streams, then long prompts among them, one after another. `send` sends one of
    these; without it they go where the streams go, for one token."""

    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        model: str,
        streams: int,
        settle: int,
        send: Send | None = None,
    ):
        self.url, self.headers, self.model, self.settle = url, headers, model, settle
        self.send = send or (lambda ids: call(self.url, asked(self.model, ids, 1), self.headers))
        self.calls: dict[int, Call] = {}
        self.settled = asyncio.Event()
        self.streams = streams

    async def run(
        self, prompts: list[list[int]], longs: list[list[int]], output: int
    ) -> dict[str, Any]:
        """Figures of the round, in ms. Raises SystemExit when the server refuses a request or a
        stream ends too early. No stream is left, however it ends."""
        tasks = [asyncio.create_task(self._stream(ids, output)) for ids in prompts]
        try:
            return await self._among(tasks, longs)
        finally:
            for task in tasks:
                task.cancel()

    async def _among(
        self, tasks: list[asyncio.Task[Call]], longs: list[list[int]]
    ) -> dict[str, Any]:
        """The round while its streams run."""
        ended = asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(
            [asyncio.create_task(self.settled.wait()), asyncio.create_task(ended)],
            return_when=asyncio.FIRST_COMPLETED,
        )
        lates: list[Call] = []
        for ids in longs if self.settled.is_set() else []:
            lates.append(await self.send(ids))
            if lates[-1].error:
                break
        early = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        problems = [*(late.error for late in lates), *(task.result().error for task in early)]
        if problem := next(filter(None, problems), ""):
            raise SystemExit(f"a request failed: {problem}")
        if early:
            raise SystemExit(
                "a stream ended before the long prompt had its first token; give --output-len more"
            )
        return figures(list(self.calls.values()), lates)

    async def _stream(self, ids: list[int], output: int) -> Call:
        def seen(each: Call) -> None:
            self.calls[id(each)] = each
            if len(self.calls) == self.streams and all(
                len(c.stamps) >= self.settle for c in self.calls.values()
            ):
                self.settled.set()

        return await call(self.url, asked(self.model, ids, output), self.headers, seen)


def figures(calls: list[Call], lates: Sequence[Call]) -> dict[str, Any]:
    """Gaps of the streams before long prompts were sent and while these waited for their first
    token, in ms."""
    gaps = [pair for each in calls for pair in zip(each.stamps, each.stamps[1:], strict=False)]
    before = [after - start for start, after in gaps if after <= lates[0].begin]
    stall, at = max(
        (after - start, start - late.begin)
        for start, after in gaps
        for late in lates
        if after > late.begin and start < late.stamps[0]
    )
    return {
        "stall_ms": round(stall * 1e3, 2),
        "stall_at_ms": round(at * 1e3, 2),  # from when its prompt was sent
        "median_itl_ms": round(statistics.median(before) * 1e3, 3),
        "worst_itl_before_ms": round(max(before) * 1e3, 2),
        "prompt_ttft_ms": round(statistics.median(late.ttft for late in lates) * 1e3, 2),
    }


async def measure(a: Any) -> list[dict[str, Any]]:
    """Every round, after one that warms up."""
    rng, headers = random.Random(a.seed), key_header(a.api_key)
    found = []
    for _ in range(a.repeat + 1):
        prompts = [
            [rng.randrange(*a.token_ids) for _ in range(a.input_len)] for _ in range(a.streams)
        ]
        long = [rng.randrange(*a.token_ids) for _ in range(a.prompt_len)]
        one = Round(a.base_url + "/v1/completions", headers, a.model, a.streams, a.settle)
        found.append(await one.run(prompts, [long], a.output_len))
    return found[1:]


def main() -> None:
    """Run the rounds and report the worst."""
    args = client_parser(__doc__)
    args.add_argument("--streams", type=int, default=16)
    args.add_argument(
        "--prompt-len", type=int, default=8192, help="tokens of the prompt that arrives"
    )
    args.add_argument("--input-len", type=int, default=512, help="tokens of each stream's prompt")
    args.add_argument(
        "--output-len", type=int, default=2048, help="tokens that each stream would send"
    )
    args.add_argument(
        "--settle", type=int, default=64, help="events of each stream before the prompt is sent"
    )
    args.add_argument("--repeat", type=int, default=3)
    a = args.parse_args()
    with served(a.serve, a.base_url) as (a.base_url, start):
        a.model = a.model or first_model(a.base_url, key_header(a.api_key))
        rounds = asyncio.run(measure(a))
    worst = max(rounds, key=lambda each: each["stall_ms"])
    finish(
        "stall",
        a,
        {"streams": a.streams, "prompt": a.prompt_len} | worst | {"rounds": rounds} | start,
        host(a.device),
    )


if __name__ == "__main__":
    main()
