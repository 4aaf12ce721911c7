"""Makes beams.json: what transformers' beam search finds in some of the golden checkpoints, in
float32.

Needs torch, transformers and numpy, which the tests do not: `python tests/goldens/make_beams.py`.
Each entry is one prompt under one setting, with the sequences (without the prompt) and their
scores, best first.
"""

from __future__ import annotations

import collections
import json
import pathlib
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
CHECKPOINTS = ("llama-gqa", "mistral-window", "qwen3-gqa")
PROMPTS = (1, 2)  # 7 and 40 tokens
FEW, MANY = 1, 4  # end tokens of a setting
SETTINGS: tuple[dict[str, Any], ...] = (
    {
        "num_beams": 4,
        "length_penalty": 1.0,
        "early_stopping": False,
        "max_new_tokens": 20,
        "eos_token_id": MANY,
    },
    {
        "num_beams": 3,
        "length_penalty": 0.0,
        "early_stopping": "never",
        "max_new_tokens": 24,
        "eos_token_id": FEW,
    },
    {
        "num_beams": 5,
        "length_penalty": 2.0,
        "early_stopping": True,
        "max_new_tokens": 24,
        "eos_token_id": MANY,
    },
    {
        "num_beams": 2,
        "length_penalty": -1.0,
        "early_stopping": False,
        "max_new_tokens": 30,
        "eos_token_id": MANY,
    },
    {
        "num_beams": 8,
        "length_penalty": 0.6,
        "early_stopping": "never",
        "max_new_tokens": 12,
        "eos_token_id": MANY,
    },
    {
        "num_beams": 4,
        "length_penalty": 1.0,
        "early_stopping": True,
        "max_new_tokens": 16,
        "min_new_tokens": 8,
        "eos_token_id": MANY,
    },
)


@torch.no_grad()
def main() -> None:
    """Every checkpoint, prompt and setting."""
    found = []
    for name in CHECKPOINTS:
        model = AutoModelForCausalLM.from_pretrained(
            HERE / name, attn_implementation="eager", dtype=torch.float32
        ).eval()
        with np.load(HERE / name / "golden.npz") as golden:
            prompts = [golden[f"prompt_{index}"].tolist() for index in PROMPTS]
        for prompt in prompts:
            ends = ends_of(model, prompt)
            for setting in (
                {**setting, "eos_token_id": ends[: setting["eos_token_id"]]} for setting in SETTINGS
            ):
                found.append(
                    {"checkpoint": name, "prompt": prompt, "setting": setting}
                    | beams(model, prompt, setting)
                )
    lines = ",\n".join(json.dumps(entry) for entry in found)
    (HERE / "beams.json").write_text(f"[\n{lines}\n]\n")


def ends_of(model: Any, prompt: list[int]) -> list[int]:
    """Tokens that the model says often, but not most often, so that sequences of many lengths end
    with them."""
    said = beams(model, prompt, {"num_beams": 8, "max_new_tokens": 24, "eos_token_id": []})[
        "sequences"
    ]
    return [
        token
        for token, _ in collections.Counter(token for row in said for token in row).most_common()
    ][3::3][:MANY]


def beams(model: Any, prompt: list[int], setting: dict[str, Any]) -> dict[str, Any]:
    """Sequences and scores; what comes after a sequence's end is padding."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_return_sequences=setting["num_beams"],
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **setting | {"eos_token_id": setting["eos_token_id"] or None},
    )
    sequences = [upto_end(row[len(prompt) :].tolist(), setting) for row in out.sequences]
    return {
        "sequences": sequences,
        "scores": [round(float(score), 7) for score in out.sequences_scores],
    }


def upto_end(tokens: list[int], setting: dict[str, Any]) -> list[int]:
    """Without padding."""
    first = next(
        (i for i, token in enumerate(tokens) if token in setting["eos_token_id"]), len(tokens)
    )
    return tokens[: first + 1]


if __name__ == "__main__":
    main()
