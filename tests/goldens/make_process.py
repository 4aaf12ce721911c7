"""Makes process.npz: random logits as transformers' logits processors make them, in the order in
which its `generate` runs them.

Needs torch and transformers, which the tests do not: `python tests/goldens/make_process.py`. The
options of case i are a JSON text.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
)

V = 80
STOP = 7
CASES = 48


def processors(options: dict, prompt_length: int) -> LogitsProcessorList:
    """Those that the options need."""
    found = LogitsProcessorList()
    if "logit_bias" in options:
        found.append(
            SequenceBiasLogitsProcessor(
                [[[int(token)], bias] for token, bias in options["logit_bias"].items()]
            )
        )
    if "repetition_penalty" in options:
        found.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if "banned" in options:
        found.append(
            NoBadWordsLogitsProcessor(
                [[token] for token in options["banned"]], eos_token_id=torch.tensor([STOP])
            )
        )
    if "min_tokens" in options:
        found.append(
            MinNewTokensLengthLogitsProcessor(
                prompt_length, options["min_tokens"], eos_token_id=torch.tensor([STOP])
            )
        )
    if "allowed_token_ids" in options:
        found.append(
            PrefixConstrainedLogitsProcessor(lambda *_: options["allowed_token_ids"], num_beams=1)
        )
    if "temperature" in options:
        found.append(TemperatureLogitsWarper(options["temperature"]))
    return found


def main() -> None:
    """Write the file."""
    rng = np.random.default_rng(0)
    saved: dict[str, np.ndarray] = {}
    for case in range(CASES):
        every = {
            "logit_bias": {
                str(token): round(float(rng.uniform(-8, 8)), 2) for token in rng.permutation(V)[:6]
            },
            "repetition_penalty": round(float(rng.uniform(0.6, 2)), 3),
            "banned": rng.permutation(np.setdiff1d(np.arange(V), STOP))[:9].tolist(),
            "min_tokens": int(rng.integers(1, 12)),
            "allowed_token_ids": sorted(rng.permutation(V)[:50].tolist()),
            "temperature": round(float(rng.uniform(0.3, 2)), 2),
        }
        options = {name: value for name, value in every.items() if rng.random() < 0.5}
        prompt, output = (
            rng.integers(0, V, rng.integers(1, 20)),
            rng.integers(0, V, rng.integers(0, 20)),
        )
        logits = (rng.standard_normal(V) * 4).astype(np.float32)
        ids = torch.tensor(np.concatenate([prompt, output])[None])
        found = (
            processors(options, len(prompt))(ids, torch.tensor(logits[None]))
            if options
            else torch.tensor(logits[None])
        )
        saved |= {
            f"logits_{case}": logits,
            f"prompt_{case}": prompt.astype(np.int32),
            f"output_{case}": output.astype(np.int32),
        }
        saved |= {
            f"options_{case}": np.array(json.dumps(options)),
            f"found_{case}": found[0].numpy(),
        }
    np.savez_compressed(pathlib.Path(__file__).parent / "process.npz", **saved)


if __name__ == "__main__":
    main()
