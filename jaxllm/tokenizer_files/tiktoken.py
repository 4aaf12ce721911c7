"""tiktoken files: a line for each token, its bytes in base64 and its rank."""

from __future__ import annotations

import binascii
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tokenizers import AddedToken
from tokenizers.normalizers import Normalizer

from jaxllm.tokenizer_files.byte_pairs import Built, byte_level, frame
from jaxllm.tokenizer_files.settings import MAX_ID, Settings

# Letters in runs with one other character before them, digits three at a time (cl100k)
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERN_OF_DIGITS = PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")  # digits one at a time

Ranks = dict[bytes, int]


def stated(lines: Sequence[tuple[bytes, int]]) -> Ranks:
    """Ranks as the lines state them. Raises ValueError when a token or a rank is there twice."""
    ranks = dict(lines)
    if len(ranks) != len(lines) or len(set(ranks.values())) != len(lines):
        raise ValueError("a token or a rank is there twice")
    return ranks


def numbered(lines: Sequence[tuple[bytes, int]]) -> Ranks:
    """Ranks by place among the lines, whatever these state."""
    return {token: rank for rank, token in enumerate(dict.fromkeys(token for token, _ in lines))}


def reserved(count: int) -> Callable[[int], list[str]]:
    """Names for so many ids after the ranks, from the number of ranks."""
    return lambda base: [f"<|reserved_token_{id}|>" for id in range(base, base + count)]


@dataclass(frozen=True)
class Tiktoken:
    """A format of tokenizers whose vocabulary is a tiktoken file.

    Attributes:
        classes: tokenizer classes that repositories of the format name.
        pattern: the regex that splits text.
        specials: names of special tokens after the last rank, from the number of ranks.
        before: special tokens in front of each text.
        ranks: from lines to ranks.
        normalizer: of text that is no special token.
    """

    classes: tuple[str, ...]
    pattern: str
    specials: Callable[[int], Sequence[str]]
    before: tuple[str, ...] = ()
    ranks: Callable[[Sequence[tuple[bytes, int]]], Ranks] = stated
    normalizer: Normalizer | None = None

    file_kind: ClassVar[str] = "tiktoken"

    def build(self, data: bytes, settings: Settings) -> Built:
        """The tokenizer of a file. Raises ValueError for one that is not of the format."""
        ranks = self.ranks(read_lines(data))
        added = special_tokens(len(ranks), self.specials(len(ranks)), settings.added)
        backend = byte_level(ranks, 0, self.pattern, added)
        if self.normalizer is not None:
            backend.normalizer = self.normalizer
        frame(backend, self.before, ())
        return Built(backend, {})


def special_tokens(
    base: int, names: Sequence[str], added: Mapping[int, AddedToken]
) -> dict[int, AddedToken]:
    """Tokens named from `base` on; those of `added` have their ids, and each name has one id."""
    taken = {token.content for token in added.values()}
    named = {
        base + index: AddedToken(name, normalized=False, special=True)
        for index, name in enumerate(names)
        if name not in taken
    }
    return named | dict(added)


def read_lines(data: bytes) -> list[tuple[bytes, int]]:
    """Tokens and ranks of a tiktoken file. Raises ValueError, which names the line."""
    lines = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            entry = (binascii.a2b_base64(token, strict_mode=True), int(rank))
        except ValueError:
            raise ValueError(f"line {number} is not a token in base64 and its rank") from None
        if not 0 <= entry[1] < MAX_ID or not entry[0]:
            raise ValueError(
                f"line {number} has an empty token or a rank outside 0 to {MAX_ID - 1}"
            )
        lines.append(entry)
    return lines
