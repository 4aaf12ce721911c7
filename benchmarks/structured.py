"""The cost of structured output: tokens per second of a free batch, a batch that follows a JSON
schema, and a mixed one.

Random weights write random JSON, so the vocabulary matters and the model does not. A shape gets a
byte-level tokenizer of its vocabulary's size. The schema is an array that cannot end before the
row's full length.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import finish, parser
from benchmarks.shapes import PREFIX, engine_options
from jaxllm import LLM, SamplingParams
from jaxllm.tokenizer import byte_alphabet

SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 999_999},
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["person", "company", "place"]},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["id", "name", "kind", "score", "tags"],
        "additionalProperties": False,
    },
}


def write_tokenizer(directory: Path, count: int) -> None:
    """A byte-level tokenizer of `count` tokens: bytes, then pieces of random words, many of them
    after a space, as in real ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    rng, vocabulary = random.Random(0), {letter: at for at, letter in enumerate(byte_alphabet())}
    merges: list[tuple[str, str]] = []
    words = [
        '":',
        '",',
        '":Ġ"',
        '",Ġ"',
        '{"',
        '},Ġ{"',
        '"name',
        '"type',
        "true",
        "false",
        "null",
        *map(str, range(1000)),
    ]
    while len(vocabulary) < count:
        word = (
            words.pop()
            if words
            else rng.choice(("", "Ġ"))
            + "".join(rng.choices("etaoinshrdlucmfwypvbgkqjxzETAS", k=rng.randint(2, 9)))
        )
        for end in range(1, len(word)):
            if word[: end + 1] not in vocabulary and len(vocabulary) < count:
                merges.append((word[:end], word[end]))
                vocabulary[word[: end + 1]] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )


def options_of(model: str, directory: Path) -> dict[str, Any]:
    """Arguments of `LLM`; a shape's config is copied to `directory`, beside a tokenizer."""
    options = engine_options(model)
    if not model.startswith(PREFIX):
        return options
    shutil.copy(Path(options["model"]) / "config.json", directory)
    write_tokenizer(directory, json.loads((directory / "config.json").read_text())["vocab_size"])
    return options | {"model": str(directory), "skip_tokenizer_init": False}


def main() -> None:
    """Free, guided, and half of each; every figure is the median of some runs."""
    args = parser(__doc__)
    args.add_argument("--batch-size", type=int, default=64)
    args.add_argument("--input-len", type=int, default=128)
    args.add_argument("--output-len", type=int, default=256)
    args.add_argument("--num-iters", type=int, default=3)
    a = args.parse_args()
    with tempfile.TemporaryDirectory() as path:
        options = options_of(a.model, Path(path))
        start = time.perf_counter()
        llm = LLM(
            **options,
            max_num_seqs=max(a.batch_size, 8),
            max_model_len=a.input_len + a.output_len,
            enable_prefix_caching=False,
        )
        figures: dict[str, Any] = {"start_s": round(time.perf_counter() - start, 2)}
        figures |= measured(llm, a)
    finish("structured", a, figures)


def measured(llm: LLM, a: Any) -> dict[str, Any]:
    """Output tokens per second and per step of each mode."""
    rng, top = random.Random(a.seed), min(100_000, llm.engine.resolved.vocab_size)
    same: dict[str, Any] = {"temperature": 1.0, "max_tokens": a.output_len, "ignore_eos": True}
    free, guided = (
        SamplingParams(**same),
        SamplingParams(**same, structured_outputs={"json": SCHEMA}),
    )
    modes = {"free": (free, free), "guided": (guided, guided), "mixed": (free, guided)}

    def run(pair: tuple[SamplingParams, SamplingParams]) -> tuple[float, float]:
        prompts = [[rng.randrange(top) for _ in range(a.input_len)] for _ in range(a.batch_size)]
        start, steps = time.perf_counter(), llm.engine.stats().steps
        outputs = llm.generate(prompts, [pair[i % 2] for i in range(a.batch_size)], use_tqdm=False)
        seconds = time.perf_counter() - start
        said = sum(len(output.outputs[0].token_ids) for output in outputs)
        if said != a.batch_size * a.output_len:
            raise RuntimeError(
                "an output ended before its length: its time would count for nothing"
            )
        return said / seconds, said / (llm.engine.stats().steps - steps)

    figures: dict[str, Any] = {}
    for mode, pair in modes.items():
        run(pair)
        runs = [run(pair) for _ in range(a.num_iters)]
        figures[f"{mode}_tok_s"] = round(statistics.median(speed for speed, _ in runs), 1)
        figures[f"{mode}_tok_step"] = round(statistics.median(tokens for _, tokens in runs), 2)
    for mode in ("guided", "mixed"):
        figures[f"{mode}_share"] = round(figures[f"{mode}_tok_s"] / figures["free_tok_s"], 3)
    return figures


if __name__ == "__main__":
    main()
