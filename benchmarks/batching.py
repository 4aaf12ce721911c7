"""Continuous against static batching, and how much KV memory is allocated but unused.

Static batching runs a batch in one fixed shape until its longest row ends, then admits the next.
With geometric output lengths most rows idle most of the time. The ratio of step counts bounds the
gain of continuous batching; the benchmark measures it. "shrinking" is static admission on this
engine, whose steps get cheaper as rows end.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, replace

from benchmarks.record import finish, parser
from benchmarks.shapes import engine_options
from jaxllm import EngineConfig, SamplingParams
from jaxllm.engine.engine import Engine
from jaxllm.engine.load import load_engine
from jaxllm.messages import GenerateRequest
from jaxllm.prompt import Prompt

# The workload on which KV waste is counted: mean length 250 and more
LONG = {"num_prompts": 48, "input_len": 250}


@dataclass
class Run:
    """One pass over the workload."""

    seconds: float = 0.0
    steps: int = 0
    wasted: int = 0  # token places of running requests that hold no token, summed over steps
    allocated: int = 0


def main() -> None:
    """Run the same requests both ways on one engine and compare."""
    args = parser(__doc__)
    args.add_argument("--num-prompts", type=int, default=240)
    args.add_argument("--batch-size", type=int, default=16)
    args.add_argument("--input-len", type=int, default=16)
    args.add_argument("--mean-output-len", type=float, default=64)
    args.add_argument("--max-output-len", type=int, default=512)
    args.add_argument("--repeat", type=int, default=3)
    a = args.parse_args()
    engine = load_engine(
        EngineConfig(
            **engine_options(a.model), max_num_seqs=a.batch_size, enable_prefix_caching=False
        )
    )
    assert isinstance(engine, Engine), "batching is of models that generate"
    requests = workload(a, engine.resolved.vocab_size)
    run(engine, requests[: a.batch_size], a.batch_size)
    runner, adaptive = engine.runner, engine.runner.shapes
    few = replace(adaptive.buckets, decode=adaptive.buckets.decode[-1:])
    fixed = replace(adaptive, buckets=few)
    rounds: dict[str, list[Run]] = {"static": [], "shrinking": [], "continuous": []}
    for _ in range(a.repeat):  # in turn, so that a machine that changes speed treats all alike
        runner.shapes = fixed
        rounds["static"].append(run(engine, requests, a.batch_size))
        runner.shapes = adaptive
        rounds["shrinking"].append(run(engine, requests, a.batch_size))
        rounds["continuous"].append(run(engine, requests, len(requests)))
    static, shrinking, continuous = (min(rounds[name], key=lambda r: r.seconds) for name in rounds)
    waste = run(
        engine,
        workload(argparse.Namespace(**vars(a) | LONG), engine.resolved.vocab_size),
        a.num_prompts,
    )
    predicted, measured = static.steps / continuous.steps, static.seconds / continuous.seconds
    figures = {
        "static_requests_per_second": round(len(requests) / static.seconds, 2),
        "shrinking_requests_per_second": round(len(requests) / shrinking.seconds, 2),
        "continuous_requests_per_second": round(len(requests) / continuous.seconds, 2),
        "static_steps": static.steps,
        "continuous_steps": continuous.steps,
        "predicted_ratio": round(predicted, 3),
        "measured_ratio": round(measured, 3),
        "share_of_prediction": round(measured / predicted, 3),
        "kv_waste_long_prompts": round(waste.wasted / waste.allocated, 4),
        "mean_output_len": round(
            sum(r.params.max_tokens or 0 for r in requests) / len(requests), 1
        ),
    }
    finish("batching", a, figures)


def workload(a: argparse.Namespace, vocab: int) -> list[GenerateRequest]:
    """Random prompts of one length; output lengths geometric, capped."""
    rng = random.Random(a.seed)
    requests = []
    for i in range(a.num_prompts):
        length = 1
        while length < a.max_output_len and rng.random() > 1 / a.mean_output_len:
            length += 1
        prompt = [rng.randrange(vocab) for _ in range(a.input_len)]
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        requests.append(GenerateRequest(id=str(i), prompt=Prompt(prompt), params=params))
    return requests


def page_fill(engine: Engine) -> tuple[int, int]:
    """Tokens that running requests have, or are about to have, in their pages of the first cache
    group, and the tokens that those pages can hold."""
    used = capacity = 0
    page_size = engine.scheduler.page_size
    for request in engine.scheduler._running:
        end = len(request.pages) * page_size
        start = request.tables[0].out_of_window * page_size
        used += min(max(request.computed, request.prefill_end), end) - start
        capacity += end - start
    return used, capacity


def run(engine: Engine, requests: list[GenerateRequest], group: int) -> Run:
    """Submit `group` requests at a time, each group after the last of the one before."""
    out = Run(steps=-engine.stats().steps)
    start = time.perf_counter()
    for first in range(0, len(requests), group):
        for request in requests[first : first + group]:
            engine.add(request)
        while engine.has_work:
            engine.step()
            used, held = page_fill(engine)
            out.wasted += held - used
            out.allocated += held
    out.seconds = time.perf_counter() - start
    out.steps += engine.stats().steps
    return out


if __name__ == "__main__":
    main()
