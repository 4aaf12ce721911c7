"""Embedding throughput: random prompts of one length, all submitted at once.

    python -m benchmarks.embedding --model shape:bge-m3 --input-len 512
    python -m benchmarks.embedding --model shape:bge-base-en-v1.5 --input-len 128 --no-device
    python -m benchmarks.embedding --serve "shape:bge-m3" --input-len 512 --batch 32

Through `LLM.embed`; with `--serve` through /v1/embeddings, in requests of `--batch` prompts, of
which `--concurrency` wait at a time. Prompts are token ids. With `--no-device` nothing is computed:
every step has its result at once, so what is left is the host's work for each request.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from benchmarks.client import first_model, key_header
from benchmarks.record import finish, host, parser
from benchmarks.server import served
from benchmarks.shapes import engine_options

WARM = 64  # prompts of a first call


def options() -> argparse.ArgumentParser:
    """Those of every benchmark, and the workload's."""
    args = parser(__doc__)
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.add_argument("--num-prompts", type=int, default=2048)
    args.add_argument("--input-len", type=int, default=512, help="tokens of a prompt")
    args.add_argument("--token-ids", type=int, nargs=2, default=(3, 2000), metavar=("LOW", "HIGH"))
    args.add_argument("--repeat", type=int, default=3, help="runs; the best counts")
    args.add_argument("--max-num-batched-tokens", type=int)
    args.add_argument("--no-device", action="store_true", help="time the host alone")
    args.add_argument("--serve", metavar="ARGS", help="start a server with these arguments")
    args.add_argument("--base-url", help="measure a server that is there")
    args.add_argument("--api-key", help="is not recorded")
    args.add_argument("--batch", type=int, default=32, help="prompts of a request to a server")
    args.add_argument("--concurrency", type=int, default=32, help="requests that wait at a time")
    return args


def main() -> None:
    """Run and report requests/s and tokens/s."""
    a = options().parse_args()
    rng = random.Random(a.seed)
    token = lambda: rng.randrange(*a.token_ids)
    prompts = [[token() for _ in range(a.input_len)] for _ in range(a.num_prompts)]
    if a.serve or a.base_url:
        a.model = a.model if a.base_url else a.serve.split()[0]
        # The same prompts come again
        fresh = None if a.serve is None else f"{a.serve} --no-enable-prefix-caching"
        with served(fresh, a.base_url or "") as (url, ready):
            embed = over_http(url, a)
            finish("embedding-server", a, ready | timed(embed, prompts, a.repeat), host())
    else:
        finish("embedding", a, timed(in_process(a), prompts, a.repeat))


def in_process(a: argparse.Namespace) -> Callable[[list[list[int]]], Any]:
    """What embeds prompts in this process."""
    import jax.numpy as jnp

    from jaxllm import LLM

    limits: dict[str, Any] = {"max_num_batched_tokens": a.max_num_batched_tokens}
    if a.no_device:  # the weights and the programs do not matter
        limits |= {"hf_overrides": {"num_hidden_layers": 1}, "enforce_eager": True}
    llm = LLM(**engine_options(a.model), enable_prefix_caching=False, runner="pooling", **limits)
    if a.no_device:
        pooling = llm.engine.resolved.pooling
        assert pooling is not None
        none = jnp.zeros((llm.engine.resolved.max_num_seqs, pooling.size), jnp.float32)
        llm.engine.runner.run = lambda launch: [none]  # type: ignore[method-assign,assignment,return-value]
    return lambda prompts: llm.embed(prompts, use_tqdm=False)


def over_http(url: str, a: argparse.Namespace) -> Callable[[list[list[int]]], Any]:
    """What sends prompts to a server, in requests of `a.batch`."""
    headers = {"content-type": "application/json"} | key_header(a.api_key)
    model = first_model(url, headers)

    def send(inputs: list[list[int]]) -> None:
        body = {"model": model, "input": inputs, "encoding_format": "base64"}
        request = urllib.request.Request(f"{url}/v1/embeddings", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as reply:
            assert len(json.load(reply)["data"]) == len(inputs)

    def embed(prompts: list[list[int]]) -> None:
        batches = [prompts[i : i + a.batch] for i in range(0, len(prompts), a.batch)]
        with concurrent.futures.ThreadPoolExecutor(a.concurrency) as threads:
            list(threads.map(send, batches))

    return embed


def timed(
    embed: Callable[[list[list[int]]], Any], prompts: list[list[int]], repeat: int
) -> dict[str, float]:
    """Figures of the best of `repeat` runs, after one that warms up."""
    embed(prompts[:WARM])
    seconds, busy = [], []
    for _ in range(repeat):
        start, cpu = time.perf_counter(), time.process_time()
        embed(prompts)
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - cpu)
    best, tokens = min(seconds), sum(map(len, prompts))
    return {
        "elapsed_time": round(best, 4),
        "requests_per_second": round(len(prompts) / best, 1),
        "tokens_per_second": round(tokens / best, 1),
        "cpu_us_per_request": round(min(busy) / len(prompts) * 1e6, 1),  # of this process
    }


if __name__ == "__main__":
    main()
