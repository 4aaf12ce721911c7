"""A pool that holds a third of what runs at once: throughput beside the same pool with so few
requests at once that none is preempted.

`recompute` and `swap` admit by forecast, as the engine does; `eager-…` admit whatever fits now, so
that many are preempted: what an interruption costs in either mode.
"""

from __future__ import annotations

import gc
import random
import time
from typing import Any

from benchmarks.record import finish, parser
from benchmarks.shapes import engine_options
from jaxllm import LLM, SamplingParams
from jaxllm.engine.scheduling.admission import AdmissionEstimator

MODES = ("calm", "recompute", "swap", "eager-recompute", "eager-swap")


class Eager(AdmissionEstimator):
    """Expects nothing."""

    def worthwhile_steps(self, tokens: int, rows: int, step_cost: int) -> float:
        """None: what fits now is admitted."""
        return 0.0


def main() -> None:
    """Run each mode in an engine of its own and report seconds, tokens per second, preemptions and
    pages moved."""
    args = parser(__doc__)
    args.add_argument("--num-prompts", type=int, default=192)
    args.add_argument(
        "--concurrency", type=int, default=96, help="requests that want to run at once"
    )
    args.add_argument("--input-len", type=int, default=1024)
    args.add_argument("--output-len", type=int, default=512)
    args.add_argument(
        "--overcommit", type=float, default=3.0, help="what those hold at their ends, in pools"
    )
    args.add_argument("--swap-space", type=float, default=32.0, help="GiB")
    args.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    args.add_argument("--block-size", type=int)
    a = args.parse_args()
    size = a.block_size or 64
    held = -(-(a.input_len + a.output_len) // size)
    pages = max(held + 1, int(a.concurrency * held / a.overcommit))
    figures: dict[str, Any] = {"pool_tokens": pages * size}
    for mode in a.modes:
        limit = max(1, (pages - max(1, pages // 100)) // held) if mode == "calm" else a.concurrency
        options: dict[str, Any] = (
            {"preemption_mode": "swap", "swap_space": a.swap_space} if mode.endswith("swap") else {}
        )
        llm = LLM(
            **engine_options(a.model),
            max_model_len=held * size,
            max_num_seqs=limit,
            num_gpu_blocks_override=pages,
            block_size=size,
            **options,
        )
        if mode.startswith("eager"):
            llm.engine.scheduler.estimator = Eager()
        figures[mode] = run(llm, a.num_prompts, a.input_len, a.output_len, a.seed)
        print(mode, figures[mode], flush=True)
        del llm
        gc.collect()
    if "calm" in figures:
        calm = figures["calm"]["output_tokens_per_second"]
        for mode in (mode for mode in a.modes if mode != "calm"):
            figures[mode]["of_calm"] = round(figures[mode]["output_tokens_per_second"] / calm, 3)
    finish("overcommit", a, figures)


def run(llm: LLM, prompts: int, inputs: int, outputs: int, seed: int) -> dict[str, Any]:
    """One workload of equal requests, none of which shares anything, after one that warms up."""
    rng = random.Random(seed)
    vocab = llm.engine.resolved.vocab_size
    work = [[rng.randrange(vocab) for _ in range(inputs)] for _ in range(prompts)]
    params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)
    start = time.perf_counter()
    done = llm.generate(work, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == outputs for output in done)
    stats = llm.engine.stats()
    return {
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(prompts * outputs / seconds, 1),
        "preemptions": stats.preemptions,
        "pages_saved": stats.pages_saved,
        "pages_loaded": stats.pages_loaded,
        "compiles_after_warmup": stats.compiles_after_warmup,
    }


if __name__ == "__main__":
    main()
