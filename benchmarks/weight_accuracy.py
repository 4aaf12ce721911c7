"""Accuracy with weights and pages in few bits: answers and perplexity of held-out conversations.

    python -m benchmarks.weight_accuracy --save

The demo model reads conversations that its training text does not have, teacher-forced, with its
weights in each format, computed in float32.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.kv_accuracy import Reader
from benchmarks.perplexity import FORMATS, Found, Text, held_out, measured, perplexity
from benchmarks.record import finish, parser

# Types of pages, each with what weights are rounded to
PAGES = (("auto", None), ("fp8_e4m3", None), ("fp8_e4m3", "fp8"), ("fp8_e5m2", None))


def with_pages(kind: str, quantization: str | None, texts: list[Text]) -> Found:
    """The same with pages of 8 bits."""
    reader = Reader(kind, "float32", quantization)
    losses = [reader.losses([*prompt, *answer], whole=True) for prompt, answer in texts]
    answers = [own[len(prompt) - 1 :] for own, (prompt, _) in zip(losses, texts, strict=True)]
    return Found(perplexity(losses), perplexity(answers), -1)


def row(name: str, found: Found, plain: Found, tokens: int) -> dict[str, Any]:
    """A line of the table; -1 wrong tokens are not counted."""
    right = None if found.wrong < 0 else round(1 - found.wrong / tokens, 5)
    change = round(found.perplexity / plain.perplexity - 1, 6)
    return {
        "format": name,
        "perplexity": round(found.perplexity, 6),
        "perplexity_change": change,
        "perplexity_of_answers": round(found.answers, 6),
        "answer_tokens_right": right,
        "answer_tokens": tokens,
    }


def main() -> None:
    """One row a format; changes are to plain weights."""
    args = parser(__doc__)
    args.add_argument("--number", type=int, default=4, help="conversations of each kind")
    a = args.parse_args()
    if a.model != "demo":
        args.error("the demo model alone has conversations that it was not trained with")
    texts = held_out(a.number)
    tokens = sum(len(answer) for _, answer in texts)
    plain = measured(None, texts)
    rows = [row("plain", plain, plain, tokens)]
    for name, kind in FORMATS.items():
        rows.append(row(name, measured(kind, texts), plain, tokens))
        print(json.dumps(rows[-1]), flush=True)
    for kind, wish in PAGES:
        name = f"kv_cache_dtype {kind}" if wish is None else f"{wish}, kv_cache_dtype {kind}"
        rows.append(row(name, with_pages(kind, wish, texts), plain, tokens))
        print(json.dumps(rows[-1]), flush=True)
    finish("weight-accuracy", a, rows)


if __name__ == "__main__":
    main()
