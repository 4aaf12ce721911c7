"""A checker and matchers for the built-in model's tokenizer, and a walk along allowed tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxllm.grammar.checker import Checker, special_tokens
from jaxllm.grammar.matcher import Matcher, Matchers
from jaxllm.grammar.structure import StructuredOutputsParams

WIDTH = 800  # logits; the tokenizer has 768
EOS = [759, 761]


@pytest.fixture(scope="session")
def tokenizer(repo) -> Tokenizer:
    """The built-in model's: byte-level, with special tokens."""
    return Tokenizer.from_file(str(repo / "jaxllm" / "demo" / "tokenizer.json"))


@pytest.fixture(scope="session")
def checker(tokenizer: Tokenizer) -> Iterator[Checker]:
    checker = Checker(special_tokens(tokenizer))
    yield checker
    checker.end_processes()


@pytest.fixture(scope="session")
def matchers(tokenizer: Tokenizer) -> Iterator[Matchers]:
    matchers = Matchers(tokenizer, WIDTH, EOS)
    yield matchers
    matchers.end_threads()


class Speaker:
    """Generates random allowed tokens."""

    def __init__(self, checker: Checker, matchers: Matchers, tokenizer: Tokenizer):
        self.checker, self.matchers, self.tokenizer = checker, matchers, tokenizer

    def matcher(self, **given) -> Matcher:
        """A matcher at the start of the structure."""
        return self.matchers.start_matcher(
            self.checker.compile_params(StructuredOutputsParams(**given))
        ).result(60)

    def speak(self, matcher: Matcher, seed: int, most: int = 20_000) -> list[int]:
        """The tokens until the end, at most `most` of them, without the one that ends the text."""
        rng, said = random.Random(seed), []
        while not matcher.ended:
            allowed = allowed_by(matcher)
            onward = [t for t in allowed if t not in EOS]
            token = rng.choice(
                EOS if len(onward) < len(allowed) and rng.random() < 0.3 else onward or EOS
            )
            matcher.accept_tokens([token])
            said.append(token)
            assert len(said) < most
        return [t for t in said if t not in EOS]

    def say(self, seed: int, **given) -> str:
        """A whole text."""
        matcher = self.matcher(**given)
        text = self.tokenizer.decode(self.speak(matcher, seed), skip_special_tokens=False)
        self.matchers.recycle(matcher)
        return text


@pytest.fixture(scope="session")
def speaker(checker: Checker, matchers: Matchers, tokenizer: Tokenizer) -> Speaker:
    return Speaker(checker, matchers, tokenizer)


def allowed_by(matcher: Matcher) -> list[int]:
    """The tokens that the matcher's mask allows."""
    bits = np.full(-(-WIDTH // 32), 2**32 - 1, np.uint32)
    matcher.apply_mask(bits)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
