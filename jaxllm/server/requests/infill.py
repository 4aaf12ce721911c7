"""Prompts with a suffix (fill in the middle), for models that were trained with marker tokens."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.tokenizer import Tokenizer

# Markers of prefix, suffix and middle, and tokens that end the middle besides the model's own
FORMATS: tuple[tuple[tuple[str, str, str], tuple[str, ...]], ...] = (
    (
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ("<file_sep>",)),  # StarCoder, Granite
    (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), ()),  # DeepSeek
    (("▁<PRE>", "▁<SUF>", "▁<MID>"), ("▁<EOT>",)),  # CodeLlama
)
ANCHOR = "\u263a"  # a text that no token of a vocabulary continues


@dataclass(frozen=True, slots=True)
class Infill:
    """The marker tokens of one tokenizer.

    Attributes:
        markers: ids before the prefix, before the suffix and before the middle.
        ends: ids that end the middle.
    """

    markers: tuple[int, int, int]
    ends: tuple[int, ...]

    def prompt(self, tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
        """Token ids of a prompt that asks for the text between `prefix` and `suffix`."""
        before, after, between = self.markers
        return [
            *tokenizer.encode(""),
            before,
            *tokenizer.encode(prefix, add_special_tokens=False),
            after,
            *continued(tokenizer, suffix),
            between,
        ]


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    """The format whose markers are single tokens of the vocabulary, if any."""
    find = tokenizer.backend.token_to_id
    for (before, after, between), ends in FORMATS:
        prefix = find(before)
        suffix = find(after)
        middle = find(between)
        if prefix is not None and suffix is not None and middle is not None:
            ids = [find(end) for end in ends]
            return Infill((prefix, suffix, middle), tuple(id for id in ids if id is not None))
    return None


def continued(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text that is not the beginning of one: without the space that SentencePiece
    puts before a text."""
    anchor = tokenizer.encode(ANCHOR, add_special_tokens=False)
    if not (tokenizer.backend.id_to_token(anchor[0]) or "").startswith("▁"):
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode(ANCHOR + text, add_special_tokens=False)[len(anchor) :]
