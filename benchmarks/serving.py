"""Load on a server of the OpenAI protocol, in the terms of `vllm bench serve`: arrivals at a rate,
streamed answers, latencies, goodput.

    python -m jaxllm.server --model DIR --load-format dummy &
    python -m benchmarks.serving --base-url http://127.0.0.1:8000 --request-rate 20 --num-prompts
      400 \\
        --random-input-len 512 --random-output-len 128 --ignore-eos

TTFT is the time to the first event with a token, ITL the gaps between events, TPOT (latency - TTFT)
/ (output tokens - 1), E2EL the latency to the last token; tokens are those of `usage`. Prompts are
random token ids. Several client processes share the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import queue
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.client import (
    Call,
    above_zero,
    call,
    client_parser,
    first_model,
    key_header,
    share,
    whole,
)
from benchmarks.record import finish, host
from benchmarks.server import served

METRICS = ("ttft", "tpot", "itl", "e2el")
START_SECONDS = 0.2  # between the moment at which all clients are ready and the first arrival

type Job = tuple[float, dict[str, Any]]  # seconds after the start, body


def jobs(a: argparse.Namespace) -> list[Job]:
    """Every request with its time of arrival. Gaps are gamma distributed (burstiness 1: Poisson),
    scaled so that the last request arrives when the rate says."""
    rng = np.random.default_rng(a.seed)
    gaps = np.zeros(a.num_prompts)
    if math.isfinite(a.request_rate):
        gaps = rng.gamma(a.burstiness, 1 / (a.request_rate * a.burstiness), a.num_prompts)
        gaps *= a.num_prompts / a.request_rate / gaps.sum()
    lengths = [
        between(rng, length, a.random_range_ratio, a.num_prompts)
        for length in (a.random_input_len, a.random_output_len)
    ]
    common = {
        "model": a.model,
        "ignore_eos": a.ignore_eos,
        "temperature": a.temperature,
    } | a.extra_body
    out: list[Job] = []
    for at, size, length in zip(np.cumsum(gaps), *lengths, strict=True):
        ids = rng.integers(*a.token_ids, size).tolist()
        prompt: dict[str, Any] = {"prompt": ids}
        if a.endpoint.endswith("/chat/completions"):
            prompt = {"messages": [{"role": "user", "content": " ".join(map(str, ids))}]}
        out.append((float(at), common | prompt | {"max_tokens": int(length)}))
    return out


def between(rng: np.random.Generator, length: int, ratio: float, count: int) -> np.ndarray:
    """Whole numbers, uniform within `ratio` around `length`."""
    return rng.integers(
        max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio)) + 1, count
    )


async def send(work: list[Job], url: str, headers: dict[str, str], limit: int, done: Any) -> None:
    """Start every request at its time, at most `limit` at once (0: no limit), and put each `Call`
    into `done`."""
    places = asyncio.Semaphore(limit or len(work) + 1)

    async def one(at: float, body: dict[str, Any]) -> None:
        await asyncio.sleep(START_SECONDS + at)
        async with places:
            done.put(await call(url, body, headers))

    await asyncio.gather(*(one(*job) for job in work))


def client(
    work: list[Job], url: str, headers: dict[str, str], limit: int, done: Any, ready: Any
) -> None:
    """One client process."""
    ready.wait()
    asyncio.run(send(work, url, headers, limit, done))


def run(a: argparse.Namespace, work: list[Job]) -> list[Call]:
    """All requests through `a.processes` clients, with a progress bar. Raises RuntimeError when a
    client breaks down."""
    context = multiprocessing.get_context("spawn")
    count = min(a.processes, len(work), a.max_concurrency or len(work))
    done, ready, calls = context.Queue(), context.Barrier(count + 1), []
    url, headers = a.base_url + a.endpoint, key_header(a.api_key)
    shares = [
        (a.max_concurrency or 0) // count + (k < (a.max_concurrency or 0) % count)
        for k in range(count)
    ]
    clients = [
        context.Process(
            target=client, args=(work[k::count], url, headers, shares[k], done, ready), daemon=True
        )
        for k in range(count)
    ]
    for process in clients:
        process.start()
    ready.wait(60)
    with tqdm(total=len(work), unit="request", dynamic_ncols=True, disable=a.disable_tqdm) as bar:
        while len(calls) < len(work):
            try:
                calls.append(done.get(timeout=1))
                bar.update()
            except queue.Empty:
                if any(process.exitcode for process in clients):
                    raise RuntimeError("a client process broke down") from None
    for process in clients:
        process.join()
    return calls


def figures(calls: list[Call], a: argparse.Namespace) -> dict[str, Any]:
    """The result under the names of `vllm bench serve`. Raises SystemExit when every request
    failed."""
    good = [each for each in calls if not each.error]
    if not good:
        raise SystemExit(f"every request failed; the first: {calls[0].error}")
    duration = max(each.stamps[-1] for each in good) - min(each.begin for each in good)
    inputs, outputs = (
        sum(each.prompt_tokens for each in good),
        sum(each.output_tokens for each in good),
    )
    out = {
        "request_rate": "inf" if math.isinf(a.request_rate) else a.request_rate,
        "max_concurrency": a.max_concurrency,
        "completed": len(good),
        "failed": len(calls) - len(good),
        "errors": sorted({each.error for each in calls if each.error})[:5],
        "duration": round(duration, 3),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": round(len(good) / duration, 3),
        "output_throughput": round(outputs / duration, 1),
        "total_token_throughput": round((inputs + outputs) / duration, 1),
    }
    if a.goodput:
        out["request_goodput"] = round(sum(meets(each, a.goodput) for each in good) / duration, 3)
    values = {name: [x for each in good for x in measured(each)[name]] for name in METRICS}
    for name in a.percentile_metrics:
        out |= summary(name, np.asarray(values[name]) * 1e3, a.metric_percentiles)
    return out


def measured(each: Call) -> dict[str, list[float]]:
    """A request's part of every metric, in seconds."""
    tpot = [each.tpot] if each.output_tokens > 1 else []
    return {"ttft": [each.ttft], "tpot": tpot, "itl": each.gaps, "e2el": [each.latency]}


def meets(each: Call, goals: dict[str, float]) -> bool:
    """Whether a request keeps within every goal, in ms."""
    own = measured(each)
    return all(value * 1e3 <= limit for name, limit in goals.items() for value in own[name])


def summary(name: str, values: np.ndarray, percentiles: list[float]) -> dict[str, float]:
    """Mean, median, deviation and percentiles of one metric, in ms; empty when nothing was
    measured."""
    if not values.size:
        return {}
    out = {
        f"mean_{name}_ms": values.mean(),
        f"median_{name}_ms": np.median(values),
        f"std_{name}_ms": values.std(),
    }
    out |= {f"p{p:g}_{name}_ms": np.percentile(values, p) for p in percentiles}
    return {key: round(float(value), 3) for key, value in out.items()}


def goals(words: list[str]) -> dict[str, float]:
    """`ttft:200 tpot:20` as numbers. Raises SystemExit on what is none."""
    try:
        found = {name: float(value) for name, value in (word.split(":") for word in words)}
    except ValueError:
        raise SystemExit(
            f"--goodput takes pairs such as ttft:200 tpot:20, got {' '.join(words)}"
        ) from None
    if unknown := found.keys() - {"ttft", "tpot", "e2el"}:
        raise SystemExit(f"--goodput knows ttft, tpot and e2el, not {', '.join(sorted(unknown))}")
    return found


def names(text: str) -> list[str]:
    """Names of metrics, separated by commas."""
    found = text.split(",")
    if unknown := set(found) - set(METRICS):
        raise argparse.ArgumentTypeError(
            f"no metric {', '.join(sorted(unknown))}; there are {', '.join(METRICS)}"
        )
    return found


def options() -> argparse.ArgumentParser:
    """The command line."""
    args = client_parser(__doc__)
    args.add_argument(
        "--endpoint",
        default="/v1/completions",
        help="or /v1/chat/completions, with the ids as words",
    )
    args.add_argument("--num-prompts", type=whole(1), default=1000)
    args.add_argument(
        "--request-rate",
        type=above_zero,
        default=math.inf,
        help="requests per second; inf sends all at once",
    )
    args.add_argument(
        "--burstiness",
        type=above_zero,
        default=1.0,
        help="1: Poisson arrivals; below: burstier; above: more even",
    )
    args.add_argument("--max-concurrency", type=whole(0), help="requests in flight at most")
    args.add_argument("--random-input-len", type=whole(1), default=1024)
    args.add_argument("--random-output-len", type=whole(1), default=128)
    args.add_argument(
        "--random-range-ratio",
        type=share,
        default=0.0,
        help="lengths are uniform within this part around theirs",
    )
    args.add_argument("--temperature", type=float, default=0.0)
    args.add_argument(
        "--extra-body",
        type=json.loads,
        default={},
        help="JSON object of further fields of every request",
    )
    args.add_argument(
        "--ignore-eos", action="store_true", help="every output runs to its full length"
    )
    args.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests within these limits, e.g. ttft:200 tpot:20",
    )
    args.add_argument(
        "--percentile-metrics", type=names, default=list(METRICS), help=f"of {','.join(METRICS)}"
    )
    args.add_argument(
        "--metric-percentiles",
        type=lambda text: [float(p) for p in text.split(",")],
        default=[50.0, 90.0, 99.0],
    )
    args.add_argument("--processes", type=whole(1), default=4, help="client processes")
    args.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    return args


def main() -> None:
    """Send the load and report."""
    a = options().parse_args()
    a.goodput = goals(a.goodput)
    with served(a.serve, a.base_url) as (a.base_url, start):
        a.model = a.model or first_model(a.base_url, key_header(a.api_key))
        found = figures(run(a, jobs(a)), a)
    finish("serving", a, found | start, host(a.device))


if __name__ == "__main__":
    main()
