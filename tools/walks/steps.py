"""Generates with the library of a checkout, in a process that `recorder` records: first the trace
of the first decode, then many steady steps. Run by the measuring script, by this file's path."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import jax

from jaxllm import LLM, SamplingParams

TRACE, STEPS = 128, 129
TOKENS = 200
PROMPT = "12 + 34 ="


def main() -> None:
    """Two phases: one whose first decode is traced anew, one of steady steps."""
    with (Path(os.environ["WALKS_FOLDER"]) / "phase").open("r+b") as file:
        phase = mmap.mmap(file.fileno(), 1)
    llm = LLM("demo", max_num_seqs=2, max_model_len=512, enforce_eager=True)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    jax.clear_caches()  # functions that the first program traced are traced anew
    phase[0] = TRACE
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    phase[0] = 0
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    llm.generate(PROMPT, params, use_tqdm=False)
    phase[0] = STEPS
    llm.generate(PROMPT, params, use_tqdm=False)
    phase[0] = 0


if __name__ == "__main__":
    main()
