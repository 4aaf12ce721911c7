"""Offline latency of one batch of equal prompts: time to the first token, time per output token,
time of the whole."""

from __future__ import annotations

import random
import statistics
import time

from benchmarks.record import finish, parser, percentiles
from benchmarks.shapes import engine_options
from jaxllm import LLM, SamplingParams


def main() -> None:
    """TTFT is the batch with one output token; TPOT the rest of the full length, per token."""
    args = parser(__doc__)
    args.add_argument("--batch-size", type=int, default=8)
    args.add_argument("--input-len", type=int, default=32)
    args.add_argument("--output-len", type=int, default=128)
    args.add_argument("--n", type=int, default=1, help="choices, or beams, of each prompt")
    args.add_argument("--use-beam-search", action="store_true")
    args.add_argument("--num-iters-warmup", type=int, default=2)
    args.add_argument("--num-iters", type=int, default=10)
    a = args.parse_args()
    llm = LLM(**engine_options(a.model), enable_prefix_caching=False)
    rng = random.Random(a.seed)

    def batch(output_len: int) -> float:
        prompts = [
            [rng.randrange(llm.engine.resolved.vocab_size) for _ in range(a.input_len)]
            for _ in range(a.batch_size)
        ]
        start = time.perf_counter()
        params = SamplingParams(
            temperature=0,
            max_tokens=output_len,
            ignore_eos=True,
            n=a.n,
            use_beam_search=a.use_beam_search,
        )
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    for _ in range(a.num_iters_warmup):
        batch(a.output_len)
    firsts = [batch(1) for _ in range(a.num_iters)]
    wholes = [batch(a.output_len) for _ in range(a.num_iters)]
    ttft, whole = statistics.median(firsts), statistics.median(wholes)
    figures = {
        "ttft_ms": round(ttft * 1e3, 3),
        "tpot_ms": round((whole - ttft) / (a.output_len - 1) * 1e3, 3),
        "avg_latency": round(statistics.mean(wholes), 4),
        "percentiles": percentiles(wholes),
        "latencies": [round(x, 4) for x in wholes],
    }
    finish("latency", a, figures)


if __name__ == "__main__":
    main()
