"""Builds the tokenizer (byte-level BPE, digits one by one) and renders conversations with the chat
template.

python -m examples.demo_model.tokenizer --out build/demo
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from examples.demo_model.generate import Sample, corpus

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
VOCABULARY = 768  # divides by 8, so that the logits can be split over up to eight devices
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # never shown
# One token each, but shown
VISIBLE = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
WORD_PATTERN = (
    # The family's
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def strings(samples: Iterator[Sample]) -> Iterator[str]:
    """The words of the corpus without control tokens, for counting merges."""
    for sample in samples:
        if sample.text:
            yield sample.text
        for tool in sample.tools or ():
            yield json.dumps(tool)
        for message in sample.messages:
            yield message["content"]
            yield message.get("reasoning_content", "")
            for call in message.get("tool_calls", ()):
                yield json.dumps(call["function"])


def build(documents: int = 60_000, seed: int = 11) -> Tokenizer:
    """A tokenizer of exactly `VOCABULARY` ids, the added tokens last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    size = VOCABULARY - len(CONTROL) - len(VISIBLE)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(strings(corpus(seed, documents)), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CONTROL]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in VISIBLE])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(
            f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}; use more "
            "documents"
        )
    return tokenizer


def renderer(template: Path = TEMPLATE) -> Any:
    """A compiled chat template, with the environment that transformers gives a template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template.read_text())


def render(template: Any, sample: Sample) -> str:
    """The document's text: a chat through the template, a line ended by `<|endoftext|>`."""
    if not sample.messages:
        return sample.text + "<|endoftext|>"
    return str(template.render(messages=sample.messages, tools=sample.tools, **sample.variables))


def tokenizer_config(template: str) -> dict[str, Any]:
    """`tokenizer_config.json`: transformers reads `tokenizer.json` as it is."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }


def write(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer's three files in the Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    text = TEMPLATE.read_text()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config(text), indent=2) + "\n"
    )
    (folder / "chat_template.jinja").write_text(text)


def main() -> None:
    """Build and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    write(parser.parse_args().out, build())


if __name__ == "__main__":
    main()
