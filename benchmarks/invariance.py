"""Requests alone and in a crowd, with `batch_invariant` and without: how many differ, and their
tokens per second."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

from benchmarks.record import finish, parser
from benchmarks.shapes import engine_options
from jaxllm import LLM, SamplingParams


def main() -> None:
    """Each request alone, then all at once in another order: requests whose tokens or
    log-probabilities differ, and tokens per second."""
    args = parser(__doc__)
    args.add_argument("--num-prompts", type=int, default=32)
    args.add_argument("--input-len", type=int, default=300, help="longest prompt")
    args.add_argument("--output-len", type=int, default=64)
    a = args.parse_args()
    rng = random.Random(a.seed)
    figures: dict[str, Any] = {}
    prompts: list[list[int]] = []
    for name, options in (("usual", {}), ("invariant", {"batch_invariant": True})):
        llm = LLM(
            **engine_options(a.model),
            max_num_seqs=a.num_prompts,
            max_model_len=a.input_len + a.output_len,
            **options,
        )
        top = min(100_000, llm.engine.resolved.vocab_size)
        prompts = prompts or [
            [rng.randrange(3, top) for _ in range(rng.randint(1, a.input_len))]
            for _ in range(a.num_prompts)
        ]
        params = SamplingParams(
            temperature=1.0, seed=7, max_tokens=a.output_len, ignore_eos=True, logprobs=1
        )
        llm.generate(prompts[:1], params, use_tqdm=False)
        start = time.perf_counter()
        alone = [said(llm, [prompt], params)[0] for prompt in prompts]
        middle = time.perf_counter()
        crowd = said(llm, prompts[::-1], params)[::-1]
        seconds = time.perf_counter() - middle
        tokens = a.num_prompts * a.output_len
        figures[name] = {
            "tokens_differ": sum(x[0] != y[0] for x, y in zip(alone, crowd, strict=True)),
            "logprobs_differ": sum(x[1] != y[1] for x, y in zip(alone, crowd, strict=True)),
            "alone_tok_s": round(tokens / (middle - start), 1),
            "crowd_tok_s": round(tokens / seconds, 1),
        }
        print(name, figures[name], flush=True)
        del llm
        gc.collect()
    finish("invariance", a, figures)


def said(
    llm: LLM, prompts: list[list[int]], params: SamplingParams
) -> list[tuple[list[int], float | None]]:
    """Tokens of each prompt and their log-probabilities added up, after its prefix was
    forgotten."""
    llm.reset_prefix_cache()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (list(output.outputs[0].token_ids), output.outputs[0].cumulative_logprob)
        for output in outputs
    ]


if __name__ == "__main__":
    main()
