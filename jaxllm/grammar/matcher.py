"""Grammars at work: one matcher per choice, which follows its tokens and says which may come next."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from jaxllm.grammar.limits import parser_limits

# Matchers that wait for the next request with their grammar; what they found out about it makes
# that one faster
MAX_IDLE = 128
WORKERS = 2
SPECIAL = b"\xff"  # begins a special token in what llguidance shows as bytes


class GrammarError(Exception):
    """A matcher cannot go on: a limit was reached, or a token came that it did not allow."""


class Matcher:
    """Of one choice. Has the shape of a `sampling.constraint.Constraint`; `ended` once nothing may
    follow.

    `advance` and `mask` raise GrammarError; after that, and after the end, it allows nothing but
    the end.
    """

    def __init__(self, grammar: str, tokenizer: LLTokenizer, words: int):
        self.grammar = grammar
        self.state = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        self._bits = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
        self._words, self._tokenizer = words, tokenizer
        self.check()

    @property
    def size(self) -> int:
        """Words of a mask as llguidance makes it: of the tokenizer, where that is larger than the
        model's logits."""
        return len(self._bits)

    @property
    def ended(self) -> bool:
        """Whether the text is complete and cannot go on."""
        return self.state.is_stopped() and not self.state.is_error()

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return self.state.is_accepting()

    @property
    def failed(self) -> bool:
        """Whether it cannot go on; `check` says why."""
        return self.state.is_error()

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were said, each of them allowed by the mask before it."""
        for token in token_ids:
            if not self.state.consume_token(token):
                self.check()
                raise GrammarError(f"token {token} does not follow the grammar")

    def mask(self, allowed_W: np.ndarray) -> None:
        """Clear the bits of tokens that may not come next: uint32 [W], token i is bit i % 32 of
        word i // 32."""
        self.find(self._bits)
        self.check()
        if np.count_nonzero(self._bits) == 1:
            self.spell(self._bits)
        np.bitwise_and(allowed_W, self._bits[: self._words], out=allowed_W)

    def find(self, bits: np.ndarray) -> None:
        """Write the bits of tokens that may come next, all `size` words."""
        self.state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def spell(self, bits: np.ndarray) -> None:
        """Mend a mask of one word that leaves one token alone. Where text must come that looks like
        a special token, llguidance makes it that token, which does not follow, since it is no text:
        what may come next is the first ordinary token of the text."""
        at = int(bits.argmax())
        word = int(bits[at])
        token = at * 32 + word.bit_length() - 1
        if (
            not word
            or word & (word - 1)
            or not self._tokenizer.is_special_token(token)
            or self.state.validate_tokens([token])
        ):
            return
        text = self.state.compute_ff_bytes().partition(SPECIAL)[0].decode(errors="ignore")
        for first in self._tokenizer.greedy_tokenize(text)[:1]:
            bits[at] = 0
            bits[first // 32] = 1 << first % 32

    def forced(self) -> list[int]:
        """The tokens that must come next, when there is only one way to go on; up to one that
        `spell` has to mend."""
        tokens = self.state.compute_ff_tokens()
        return tokens[: self.state.validate_tokens(tokens)]

    def check(self) -> None:
        """Raises GrammarError when the matcher has failed."""
        if self.failed:
            raise GrammarError(self.state.get_error().split("<non-verbose/>")[0].strip())


class Matchers:
    """Makes matchers for a model with `width` logits, off the caller's thread, and keeps some that
    are done for their next use.

    llguidance takes a second to read a large vocabulary, all of it under Python's lock. That
    begins, in a thread, with `warm` or with the first grammar, which waits for it.
    """

    def __init__(self, tokenizer: Tokenizer, width: int, eos: Iterable[int]):
        self._words = -(-width // 32)
        # By grammar, least recently used first
        self._idle: OrderedDict[str, list[Matcher]] = OrderedDict()
        self._idle_count = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="grammar")
        self._tokenizer, self._width, self._eos = tokenizer, width, sorted(eos)
        self._vocabulary: Future[LLTokenizer] | None = None

    def begin(self, grammar: str) -> Future[Matcher]:
        """A matcher at the start of the grammar; the future raises GrammarError when it cannot be
        made."""
        with self._lock:
            idle = self._idle.get(grammar)
            if idle:
                self._idle_count -= 1
                found: Future[Matcher] = Future()
                found.set_result(idle.pop())
                return found
        return self._pool.submit(self._make, grammar, self.warm())

    def warm(self) -> Future[LLTokenizer]:
        """Begin to read the vocabulary, once."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._pool.submit(
                    vocabulary, self._tokenizer, self._width, self._eos
                )
            return self._vocabulary

    def give_back(self, matcher: Matcher) -> None:
        """Its choice has ended."""
        if matcher.state.is_error() or not matcher.state.reset():
            return
        with self._lock:
            self._idle.setdefault(matcher.grammar, []).append(matcher)
            self._idle.move_to_end(matcher.grammar)
            self._idle_count += 1
            while self._idle_count > MAX_IDLE:
                oldest = next(iter(self._idle.values()))
                if oldest:
                    oldest.pop()
                    self._idle_count -= 1
                else:
                    self._idle.popitem(last=False)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, grammar: str, vocabulary: Future[LLTokenizer]) -> Matcher:
        # Which is under way: no queue of these comes before it
        return Matcher(grammar, vocabulary.result(), self._words)


def vocabulary(tokenizer: Tokenizer, width: int, eos: list[int]) -> LLTokenizer:
    """The tokens as llguidance takes them; ids up to the logits' width that have no token are never
    allowed."""
    size = max(width, tokenizer.get_vocab_size(with_added_tokens=True))
    return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=eos or None)
