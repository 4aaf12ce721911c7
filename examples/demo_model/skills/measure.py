"""What the training text is made of: tokens by kind, as a Markdown table.

python -m examples.demo_model.skills.measure --count 400
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from examples.demo_model.generate import Sample
from examples.demo_model.pack import learnt
from examples.demo_model.skills import corpus, errands, schemas
from examples.demo_model.tokenizer import render, renderer

Draw = Callable[[random.Random], Sample]


def kinds() -> Iterator[tuple[str, float, Draw]]:
    """Each kind of documents with its share of the corpus."""
    yield "plain text and short chats", corpus.PLAIN, corpus.plain
    total = sum(share for _, share in errands.ERRANDS.values())
    for name, (errand, share) in errands.ERRANDS.items():
        draw = lambda rng, errand=errand: errands.written_down(rng, errand)
        yield f"tools: {name}", corpus.ERRANDS * share / total, draw
    total = sum(share for _, share in schemas.MAKERS.values())
    for name, (maker, share) in schemas.MAKERS.items():
        draw = lambda rng, maker=maker: schemas.written_down(rng, maker)
        yield f"JSON to a schema: {name}", corpus.SCHEMAS * share / total, draw


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=400, help="documents of each kind")
    parser.add_argument("--tokenizer", type=Path, default=Path("jaxllm/demo/tokenizer.json"))
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    template = renderer()
    rows = []
    for name, share, draw in kinds():
        rng = random.Random(1)
        samples = [draw(rng) for _ in range(arguments.count)]
        texts = [render(template, sample) for sample in samples]
        encodings = tokenizer.encode_batch(texts)
        sizes = np.array([len(encoding.ids) for encoding in encodings])
        marks = [
            learnt(text, encoding, bool(sample.messages)).sum()
            for text, encoding, sample in zip(texts, encodings, samples, strict=True)
        ]
        rows.append((name, share, sizes.mean(), np.percentile(sizes, 99), np.mean(marks)))
    total = sum(share * mean for _, share, mean, _, _ in rows)
    print("| documents | % of documents | % of tokens | tokens, mean | p99 | learnt, mean |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, share, mean, most, marked in rows:
        print(
            f"| {name} | {100 * share:.1f} | {100 * share * mean / total:.1f} | {mean:.0f} | "
            f"{most:.0f} | {marked:.0f} |"
        )
    print(f"\n{total:.0f} tokens a document")


if __name__ == "__main__":
    main()
