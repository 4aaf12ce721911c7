"""Writes `goldens.json`: the demo model's prompts and greedy answers as transformers and torch give
them, in float32.

python -m tests.demo.make      # in an environment with torch; the tests need only the file
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from tests.demo.conversations import CHATS, LINES

DEMO = Path(__file__).parents[2] / "jaxllm" / "demo"
NEW_TOKENS = 200


def main() -> None:
    """Run every prompt through transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logging.disable(logging.WARNING)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(DEMO),
        AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32),
    )
    if type(model).__name__ != "Qwen3ForCausalLM":
        raise TypeError(
            f"transformers made a {type(model).__name__} of the demo model, not a Qwen3ForCausalLM"
        )
    prompts = {
        name: tokenizer.apply_chat_template(**chat, tokenize=False, add_generation_prompt=True)
        for name, chat in CHATS.items()
    }
    prompts |= {line: line for line in LINES}
    goldens = {}
    for name, prompt in prompts.items():
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS)[
            0, ids.shape[1] :
        ].tolist()
        goldens[name] = {
            "prompt": prompt,
            "prompt_ids": ids[0].tolist(),
            "answer": tokenizer.decode(out),
            "answer_ids": out,
        }
    Path(__file__).with_name("goldens.json").write_text(
        json.dumps(goldens, indent=1, ensure_ascii=False) + "\n"
    )


if __name__ == "__main__":
    main()
