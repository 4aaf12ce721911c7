"""Makes filters.npz: which tokens transformers' filters keep of random logits, and which its bad
words forbid after random outputs.

Needs torch and transformers, which the tests do not: `python tests/goldens/make_filters.py`. The
filters run in the order of docs/sampling.md; transformers' `generate` runs min_p last, which keeps
other tokens where it comes with top_p. What is asked in the cases is one JSON text.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

V = 96
FEW = 4  # tokens that outputs and words are made of, so that they meet
CASES = 64
WARPERS = {
    "temperature": TemperatureLogitsWarper,
    "min_p": MinPLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
}


def kept(logits: np.ndarray, options: dict[str, float], order: tuple[str, ...]) -> np.ndarray:
    """bool [V]: the tokens that are left."""
    warpers = LogitsProcessorList(
        [WARPERS[name](options[name]) for name in order if name in options]
    )
    return torch.isfinite(
        warpers(torch.zeros((1, 1), dtype=torch.long), torch.tensor(logits[None]))
    )[0].numpy()


def main() -> None:
    """Write the file."""
    rng = np.random.default_rng(1)
    cases, arrays = list[dict](), list[tuple[np.ndarray, ...]]()
    differ = 0
    for _ in range(CASES):
        every = {
            "temperature": round(float(rng.uniform(0.3, 2)), 2),
            "min_p": round(float(rng.uniform(0.005, 0.3)), 3),
            "top_k": int(rng.integers(1, V)),
            "top_p": round(float(rng.uniform(0.2, 0.98)), 3),
        }
        options = {name: value for name, value in every.items() if rng.random() < 0.6}
        logits = (rng.standard_normal(V) * 3).astype(np.float16)
        mine = kept(logits.astype(np.float32), options, ("temperature", "min_p", "top_k", "top_p"))
        theirs = kept(
            logits.astype(np.float32), options, ("temperature", "top_k", "top_p", "min_p")
        )
        differ += int((mine != theirs).any())
        assert (mine == theirs).all() or {"min_p", "top_p"} <= options.keys()
        words = [
            rng.integers(0, FEW, rng.choice([1, 2, 2, 3, 4])).tolist()
            for _ in range(rng.integers(1, 9))
        ]
        said = rng.integers(0, FEW, rng.integers(1, 12))
        bad = NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([V - 1]))
        allowed = torch.isfinite(bad(torch.tensor(said[None]), torch.zeros((1, V))))[0].numpy()
        cases.append({"options": options, "words": words, "said": said.tolist()})
        arrays.append((logits, mine, allowed))
    print(f"the order of min_p matters in {differ} of {CASES} cases")
    logits, mine, allowed = map(np.stack, zip(*arrays, strict=True))
    path = pathlib.Path(__file__).parent / "filters.npz"
    np.savez_compressed(
        path, cases=np.array(json.dumps(cases)), logits=logits, kept=mine, allowed=allowed
    )


if __name__ == "__main__":
    main()
