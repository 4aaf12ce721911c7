"""Byte-pair encodings: merges from pieces in the order of preference, and tokenizers whose pieces
are bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

MAX_TOKEN_BYTES = 1024  # merges of a token cost the square of its length


class Built(NamedTuple):
    """A tokenizer, and which of its tokens have a role (`bos_token`, …)."""

    backend: Tokenizer
    roles: dict[str, str]


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The byte of each printable stand-in of byte-level vocabularies (GPT-2's): printable bytes
    stand for themselves, the others are numbered from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


def merges(pieces: Sequence[str]) -> Iterator[tuple[str, str]]:
    """All pairs of `pieces` that join to one of them, in the order of what they join to."""
    known = set(pieces)
    for piece in pieces:
        for length in range(1, len(piece)):
            if piece[:length] in known and piece[length:] in known:
                yield piece[:length], piece[length:]


def place(pieces: Mapping[str, int], added: Mapping[int, AddedToken]) -> dict[str, int]:
    """Ids of pieces and added tokens. A piece with the id or text of an added token gives way, as
    text is searched for added tokens first."""
    ids = {text: id for text, id in pieces.items() if id not in added}
    return ids | {token.content: id for id, token in added.items()}


def byte_level(
    ranks: Mapping[bytes, int], first: int, pattern: str, added: Mapping[int, AddedToken]
) -> Tokenizer:
    """A tokenizer that splits text by `pattern` and joins bytes in the order of their ranks.

    Args:
        ranks: of each token's bytes; all 256 single bytes have one.
        first: the id of rank 0.

    Raises ValueError for ranks that are no such table, or a pattern that is no regex.
    """
    stand_ins = {byte: char for char, byte in byte_alphabet().items()}
    missing = 256 - sum(len(token) == 1 for token in ranks)
    if missing:
        raise ValueError(f"{missing} of the 256 single bytes have no token")
    if max(map(len, ranks)) > MAX_TOKEN_BYTES:
        raise ValueError(f"a token has more than {MAX_TOKEN_BYTES} bytes")
    pieces = {
        "".join(map(stand_ins.__getitem__, token)): first + rank
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    }
    ids = place(pieces, added)
    kept = [text for text, id in pieces.items() if ids.get(text) == id]
    backend = Tokenizer(models.BPE(ids, list(merges(kept)), ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([added[id] for id in sorted(added)])
    return backend


def frame(backend: Tokenizer, before: Sequence[str], after: Sequence[str]) -> None:
    """Puts tokens around each text. Raises ValueError when there is no such token."""
    ids = [(name, backend.token_to_id(name)) for name in dict.fromkeys((*before, *after))]
    for name, id in ids:
        if id is None:
            raise ValueError(f"the special token {name!r} has no id")
    single, second = ([*before, f"${text}", *after] for text in "AB")
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, *second], special_tokens=ids
    )
