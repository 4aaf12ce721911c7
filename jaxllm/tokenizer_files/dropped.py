"""Whether a tokenizer may leave out characters of a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

# Steps that take off white space, control characters or accents
DROPPING = frozenset(
    "Strip StripAccents BertNormalizer Nmt Precompiled Whitespace WhitespaceSplit "
    "BertPreTokenizer CharDelimiterSplit".split()
)


def may_drop(backend: Tokenizer) -> bool:
    """Whether a text may have fewer tokens than its characters fill: white space that is left out,
    or many characters that together are one unknown token."""
    steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
    kinds = {step["type"] for step in steps}
    model = backend.model
    # Of other models a whole word, or a run of unknown characters, may be one token
    whole = isinstance(model, BPE) and (model.byte_fallback or "ByteLevel" in kinds)
    if not whole or kinds & DROPPING or any(map(_shortens, steps)):
        return True
    added = backend.get_added_tokens_decoder().values()
    return any(token.lstrip or token.rstrip for token in added)


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """A normalizer's or pre-tokenizer's settings; those of a sequence's parts in its place."""
    if component is None:
        return
    level = [json.loads(component.__getstate__())]
    while level:
        step = level.pop()
        level += step.get("normalizers", []) + step.get("pretokenizers", [])
        yield step


def _shortens(step: dict[str, Any]) -> bool:
    """Whether a step removes what it finds, or puts something shorter in its place."""
    if step["type"] == "Replace":
        text = step["pattern"].get("String")
        return text is None or len(step["content"]) < len(text)
    return step.get("behavior") == "Removed"
