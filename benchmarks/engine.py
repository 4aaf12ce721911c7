"""The figures that compare engines, offline: start, TTFT, TPOT, throughput, sampling modes, prefix
reuse.

    python -m benchmarks.engine --model shape:qwen2.5-7b                                  start, kv,
      ttft, tpot, throughput
    python -m benchmarks.engine --model shape:qwen2.5-7b --parts cached,contexts,modes,turns

One JSON line per figure as it is found; docs/benchmarks.md defines them. The same calls run another
engine that has vLLM's `LLM` and `SamplingParams`: `--engine vllm`. The second group of parts needs
prefix caching, so it runs in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare import Row
from benchmarks.record import finish, host, parser
from benchmarks.shapes import PREFIX, engine_options

UNCACHED = ("ttft", "tpot", "throughput")
CACHED = ("cached", "contexts", "modes", "turns")
FIRST_ID, LAST_ID = 1000, 100_000  # of random prompts

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature0.6": {"temperature": 0.6},
    "topp0.9": {"temperature": 0.8, "top_p": 0.9},
    "topk50_topp0.9": {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    "minp0.05": {"temperature": 0.8, "min_p": 0.05},
    "seeded": {"temperature": 0.8, "seed": 1},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logprobs5": {"logprobs": 5},
}


class Sizes(NamedTuple):
    """How large the workloads are; figures of engines compare at equal sizes only."""

    max_model_len: int = 9216
    max_num_seqs: int = 256
    prompts: tuple[int, ...] = (128, 512, 2048, 8192)
    batches: tuple[int, ...] = (1, 16, 64, 256)
    context: int = 1024
    long_batches: tuple[tuple[int, int], ...] = (
        (1, 2048),
        (16, 2048),
        (64, 2048),
        (16, 8192),
        (64, 8192),
    )
    mixed: int = 256
    lengths: tuple[int, int] = (100, 1024)
    fixed: int = 256
    cached: tuple[int, int] = (8192, 92)
    # Users, turns, first prompt, tokens per answer
    turns: tuple[int, int, int, int] = (64, 8, 512, 64)


SMALL = Sizes(
    1024, 8, (16, 64), (1, 4), 32, ((1, 64), (4, 64)), 8, (8, 32), 16, (256, 16), (4, 2, 32, 8)
)


class Bench:
    """One engine, and workloads of random tokens on it."""

    def __init__(self, llm: Any, params: Any, sizes: Sizes, vocab: int):
        self.llm, self.params, self.sizes, self.random = llm, params, sizes, random.Random(0)
        self.ids = (min(FIRST_ID, vocab // 2), min(LAST_ID, vocab))

    def tokens(self, count: int) -> list[int]:
        """A random prompt."""
        return [self.random.randrange(*self.ids) for _ in range(count)]

    def seconds(
        self,
        prompts: list[list[int]],
        outputs: int | list[int],
        options: list[dict[str, Any]] | None = None,
    ) -> float:
        """Time of one `generate`, whose outputs must have their full lengths."""
        lengths = [outputs] * len(prompts) if isinstance(outputs, int) else outputs
        fixed = {"ignore_eos": True, "detokenize": False}
        each = options or [{}] * len(prompts)
        params = [
            self.params(**{"temperature": 0.0, **fixed, "max_tokens": n, **more})
            for n, more in zip(lengths, each, strict=True)
        ]
        start = time.perf_counter()
        results = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        found = time.perf_counter() - start
        if [len(result.outputs[0].token_ids) for result in results] != lengths:
            raise RuntimeError(
                "an output ended before its length: its time would count for nothing"
            )
        return found

    def equal(self, batch: int, context: int, outputs: int) -> float:
        """Time of a fresh batch of equal prompts."""
        return self.seconds([self.tokens(context) for _ in range(batch)], outputs)

    def ttft(self) -> Iterator[Row]:
        """One prompt, one token, alone on the engine."""
        for prompt in self.sizes.prompts:
            self.equal(1, prompt, 1)
            found = statistics.median(self.equal(1, prompt, 1) for _ in range(7))
            yield {"figure": "ttft_ms", "prompt": prompt, "value": round(found * 1e3, 2)}

    def tpot(self) -> Iterator[Row]:
        """Equal prompts, in batches of each size."""
        context = self.sizes.context
        for batch in self.sizes.batches:
            self.equal(batch, context, 4)
            found = min(
                slope(lambda length, batch=batch: self.equal(batch, context, length), 16, 144)
                for _ in range(2)
            )
            yield {
                "figure": "tpot_ms",
                "batch": batch,
                "context": context,
                "value": round(found * 1e3, 3),
            }

    def throughput(self) -> Iterator[Row]:
        """Mixed prompts, all at once."""
        rng, count = random.Random(1), self.sizes.mixed
        inputs = [rng.randint(*self.sizes.lengths) for _ in range(count)]
        outputs = [rng.randint(*self.sizes.lengths) for _ in range(count)]
        prompts = [[rng.randrange(*self.ids) for _ in range(n)] for n in inputs]
        for mode, options in (("greedy", {}), ("sampled", {"temperature": 0.6})):
            best = min(self.seconds(prompts, outputs, [options] * count) for _ in range(2))
            yield {
                "figure": "throughput",
                "mode": mode,
                "prompts": count,
                "value": round(sum(outputs) / best, 1),
            }

    def cached(self) -> Iterator[Row]:
        """A prompt whose beginning is in the cache."""
        total, new = self.sizes.cached
        prompt = self.tokens(total)
        self.seconds([prompt], 1)
        found = statistics.median(
            self.seconds([prompt[:-new] + self.tokens(new)], 1) for _ in range(5)
        )
        yield {"figure": "ttft_cached_ms", "prompt": total, "value": round(found * 1e3, 2)}

    def contexts(self) -> Iterator[Row]:
        """TPOT at longer contexts, on prompts that are computed once."""
        for batch, context in self.sizes.long_batches:
            prompts = [self.tokens(context) for _ in range(batch)]
            self.seconds(prompts, 2)
            found = slope(lambda length, prompts=prompts: self.seconds(prompts, length), 8, 72)
            yield {
                "figure": "tpot_ms",
                "batch": batch,
                "context": context,
                "value": round(found * 1e3, 3),
            }

    def modes(self) -> Iterator[Row]:
        """Every mode of sampling on its own, then all of them but log-probabilities in one
        batch."""
        rng, count, length = random.Random(1), self.sizes.mixed, self.sizes.fixed
        inputs = [rng.randint(*self.sizes.lengths) for _ in range(count)]
        every = [options for mode, options in MODES.items() if mode != "logprobs5"]
        each = {mode: [options] * count for mode, options in MODES.items()} | {
            "mixed": [every[i % len(every)] for i in range(count)]
        }
        for mode, options in each.items():
            self.seconds([self.tokens(n) for n in inputs], 16, options)
            found = self.seconds([self.tokens(n) for n in inputs], length, options)
            yield {"figure": "fixed256", "mode": mode, "value": round(count * length / found, 1)}

    def turns(self) -> Iterator[Row]:
        """Conversations that grow: each turn brings the whole of the one before."""
        users, turns, first, answer = self.sizes.turns
        prompts, start = [self.tokens(first) for _ in range(users)], time.perf_counter()
        for _ in range(turns):
            self.seconds(prompts, answer)
            prompts = [prompt + self.tokens(2 * answer) for prompt in prompts]
        found = time.perf_counter() - start
        yield {
            "figure": "multi_turn",
            "users": users,
            "turns": turns,
            "start": first,
            "value": round(found, 2),
        }


def slope(measure: Callable[[int], float], short: int, long: int) -> float:
    """Time per output token between two lengths: prefill and everything else that happens once
    cancels out."""
    begin = measure(short)
    return (measure(long) - begin) / (long - short)


def options() -> argparse.ArgumentParser:
    """The options of this benchmark."""
    args = parser(__doc__)
    args.formatter_class = argparse.RawDescriptionHelpFormatter
    args.add_argument(
        "--engine", default="jaxllm", help="the module that has LLM and SamplingParams"
    )
    args.add_argument(
        "--parts",
        default=",".join(UNCACHED),
        help=f"of {','.join(UNCACHED)} or of {','.join(CACHED)}",
    )
    args.add_argument(
        "--options", type=json.loads, default={}, help="JSON object of further arguments of LLM"
    )
    args.add_argument(
        "--compilation-cache-dir",
        help="jaxllm's; a fresh one by default, so that the start is a cold one",
    )
    args.add_argument("--small", action="store_true", help="small workloads, for trying it out")
    return args


def main() -> None:
    """Start the engine and take the figures that were asked for."""
    args = options()
    a = args.parse_args()
    parts, sizes = a.parts.split(","), SMALL if a.small else Sizes()
    if not (set(parts) <= set(UNCACHED) or set(parts) <= set(CACHED)):
        args.error(f"--parts must be of {','.join(UNCACHED)}, or of {','.join(CACHED)}")
    module = importlib.import_module(a.engine)
    shape, found = Path(a.model.removeprefix(PREFIX)).name, []
    with tempfile.TemporaryDirectory() as fresh:
        given = engine_options(a.model) | {
            "dtype": "bfloat16",
            "gpu_memory_utilization": 0.9,
            "seed": 0,
        }
        given |= {
            "max_model_len": sizes.max_model_len,
            "max_num_seqs": sizes.max_num_seqs,
            "enable_prefix_caching": parts[0] in CACHED,
        }
        cache = Path(a.compilation_cache_dir or fresh)
        again = cache.is_dir() and any(cache.iterdir())
        if a.engine == "jaxllm":
            given["compilation_cache_dir"] = str(cache)
        start = time.perf_counter()
        llm = module.LLM(**given | a.options)
        rows = [
            {
                "figure": "startup_again_s" if again else "startup_s",
                "value": round(time.perf_counter() - start, 2),
            }
        ]
        if a.engine == "jaxllm":
            resolved = llm.engine.resolved
            rows.append({"figure": "kv_tokens", "value": resolved.num_pages * resolved.page_size})
        bench = Bench(
            llm,
            module.SamplingParams,
            sizes,
            resolved.vocab_size if a.engine == "jaxllm" else LAST_ID,
        )
        for row in (
            row
            for taken in (iter(rows), *(getattr(bench, part)() for part in parts))
            for row in taken
        ):
            found.append({"shape": shape} | row)
            print(json.dumps(found[-1]), flush=True)
            # Each time: what was measured stays when the next figure fails
            finish("engine-figures", a, found, None if a.engine == "jaxllm" else host())


if __name__ == "__main__":
    main()
