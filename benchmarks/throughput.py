"""Offline throughput: prompts of mixed lengths, all submitted at once, every output at its full
length."""

from __future__ import annotations

import json
import random
import time

from benchmarks.record import finish, parser
from benchmarks.shapes import engine_options
from jaxllm import LLM, SamplingParams


def main() -> None:
    """Run and report requests/s and tokens/s; the best of `--repeat` runs, after one that warms
    up."""
    args = parser(__doc__)
    args.add_argument("--num-prompts", type=int, default=64)
    args.add_argument("--input-len", type=int, nargs=2, default=(16, 128), metavar=("MIN", "MAX"))
    args.add_argument("--output-len", type=int, nargs=2, default=(16, 128), metavar=("MIN", "MAX"))
    args.add_argument("--temperature", type=float, default=0.0)
    args.add_argument("--max-num-seqs", type=int)
    args.add_argument("--repeat", type=int, default=2)
    args.add_argument(
        "--options", type=json.loads, default={}, help="JSON object of further arguments of LLM"
    )
    a = args.parse_args()
    own = {"enable_prefix_caching": False, "max_num_seqs": a.max_num_seqs}
    llm = LLM(**engine_options(a.model) | own | a.options)
    rng = random.Random(a.seed)
    vocab = llm.engine.resolved.vocab_size
    prompts = [
        [rng.randrange(vocab) for _ in range(rng.randint(*a.input_len))]
        for _ in range(a.num_prompts)
    ]
    params = [
        SamplingParams(
            temperature=a.temperature, max_tokens=rng.randint(*a.output_len), ignore_eos=True
        )
        for _ in prompts
    ]
    llm.generate(prompts[:4], params[:4], use_tqdm=False)
    best = min(timed(llm, prompts, params) for _ in range(a.repeat))
    inputs, outputs = sum(map(len, prompts)), sum(p.max_tokens or 0 for p in params)
    figures = {
        "elapsed_time": round(best, 3),
        "num_requests": a.num_prompts,
        "requests_per_second": round(a.num_prompts / best, 2),
        "output_tokens_per_second": round(outputs / best, 1),
        "tokens_per_second": round((inputs + outputs) / best, 1),
    }
    finish("throughput", a, figures)


def timed(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Seconds for the whole workload, which takes minutes: a bar shows its progress."""
    start = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
