"""Grammar matchers: one per choice, which follows its tokens and masks those that may not come
next."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from jaxllm.background.thread import BackgroundThread
from jaxllm.grammar.limits import parser_limits
from jaxllm.grammar.reasons import plain

# Matchers kept for the next request with their grammar; the parser states that they have found make
# that one faster
MAX_IDLE = 128
WORKERS = 2
SPECIAL = b"\xff"  # begins a special token in llguidance's byte strings


class GrammarError(Exception):
    """A matcher cannot go on: a limit was reached, or a token did not follow the grammar."""


class Matcher:
    """The grammar of one choice; a `sampling.constraint.Constraint`.

    `accept_tokens` and `apply_mask` raise GrammarError. After an error, and after the end, the mask
    allows end-of-sequence tokens only.

    Attributes:
        mask_words: Words of a mask.
    """

    def __init__(self, grammar: str, tokenizer: LLTokenizer):
        self.grammar = grammar
        self.state = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
        self.mask_words = -(-tokenizer.vocab_size // 32)
        self._bits = np.zeros(self.mask_words, np.uint32)
        self._tokenizer = tokenizer
        self.raise_if_failed()

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
        """Whether it cannot go on; `raise_if_failed` gives the reason."""
        return self.state.is_error()

    def accept_tokens(self, token_ids: Sequence[int]) -> None:
        """Follow generated tokens, each allowed by the mask before it."""
        for token in token_ids:
            if not self.state.consume_token(token):
                self.raise_if_failed()
                raise GrammarError(f"token {token} does not follow the grammar")

    def apply_mask(self, allowed_W: np.ndarray) -> None:
        """Clear the bits of tokens that may not come next: uint32 [W], token i is bit i % 32 of
        word i // 32."""
        self.compute_mask(self._bits)
        self.raise_if_failed()
        if np.count_nonzero(self._bits) == 1:
            self.fix_special_token(self._bits)
        np.bitwise_and(allowed_W, self._bits, out=allowed_W)

    def compute_mask(self, bits: np.ndarray) -> None:
        """Write the bits of tokens that may come next, all `mask_words` words."""
        self.state.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)

    def fix_special_token(self, bits: np.ndarray) -> None:
        """Correct a mask that allows a single token which does not follow the grammar.

        Where forced text looks like a special token, llguidance allows that token, although it is
        no text. The mask gets the first ordinary token of the text instead.
        """
        index = int(bits.argmax())
        word = int(bits[index])
        token = index * 32 + word.bit_length() - 1
        if (
            not word
            or word & (word - 1)
            or not self._tokenizer.is_special_token(token)
            or self.state.validate_tokens([token])
        ):
            return
        text = self.state.compute_ff_bytes().partition(SPECIAL)[0].decode(errors="ignore")
        for first in self._tokenizer.greedy_tokenize(text)[:1]:
            bits[index] = 0
            bits[first // 32] = 1 << first % 32

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, up to one that `fix_special_token` has to correct."""
        tokens = self.state.compute_ff_tokens()
        return tokens[: self.state.validate_tokens(tokens)]

    def raise_if_failed(self) -> None:
        """Raises GrammarError when the matcher has failed."""
        if self.failed:
            raise GrammarError(plain(self.state.get_error()))


class Matchers:
    """Makes matchers for a model with `width` logits in threads, and keeps some for reuse.

    llguidance takes a second to read a large vocabulary, and holds the interpreter's lock
    meanwhile. `start_vocabulary` or the first grammar starts that in a thread; matchers wait for
    it.
    """

    def __init__(self, tokenizer: Tokenizer, width: int, eos: Iterable[int]):
        self._idle: deque[Matcher] = deque(maxlen=MAX_IDLE)  # a new one replaces the oldest
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="grammar")
        self._tokenizer = tokenizer
        self._width = width
        self._eos = sorted(eos)
        self._vocabulary: Future[LLTokenizer] | None = None

    def start_matcher(self, grammar: str) -> Future[Matcher]:
        """A matcher at the start of the grammar. The future raises GrammarError when it cannot be
        made."""
        with self._lock:
            idle = next((m for m in self._idle if m.grammar == grammar), None)
            if idle is not None:
                self._idle.remove(idle)
                future: Future[Matcher] = Future()
                future.set_result(idle)
                return future
        # The vocabulary was queued before, so waiting for it cannot block the pool
        tokens = self.start_vocabulary()
        return self._pool.submit(lambda: Matcher(grammar, tokens.result()))

    def start_vocabulary(self) -> Future[LLTokenizer]:
        """Start to read the vocabulary, once."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._pool.submit(
                    vocabulary, self._tokenizer, self._width, self._eos
                )
            return self._vocabulary

    def recycle(self, matcher: Matcher) -> None:
        """Keep the matcher of a choice that has ended for the next one."""
        if matcher.state.is_error() or not matcher.state.reset():
            return
        with self._lock:
            self._idle.append(matcher)

    def end_threads(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def vocabulary(tokenizer: Tokenizer, width: int, eos: list[int]) -> LLTokenizer:
    """The tokens for llguidance. Ids up to the logits' width that have no token are never allowed,
    nor tokens that have no logit."""
    text = tokenizer.to_str()
    if max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) >= width:
        text = _first_tokens(text, width)
    return LLTokenizer(text, n_vocab=width, eos_token=eos or None)


def _first_tokens(tokenizer: str, count: int) -> str:
    """A tokenizer as JSON, without tokens of ids from `count` on."""
    content = json.loads(tokenizer)
    content["added_tokens"] = [added for added in content["added_tokens"] if added["id"] < count]
    model = content["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {text: id for text, id in model["vocab"].items() if id < count}
    else:
        model["vocab"] = model["vocab"][:count]
    if "merges" in model:
        known = model["vocab"].keys()
        model["merges"] = [
            (left, right) for left, right in model["merges"] if {left, right, left + right} <= known
        ]
    return json.dumps(content)


class ParallelMatchers:
    """Accepts tokens and computes masks for many matchers. Not thread-safe.

    Between `start_masks` and `wait_masks` (or `settle`) the matchers may not be used.
    """

    def __init__(self) -> None:
        self._executor = LLExecutor()
        self._background = BackgroundThread("masks")
        # For `timed_masks`; has no thread before
        self._cores = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="mask")
        self._job: Future[None] | None = None
        self._bits_RW = np.zeros((0, 0), np.uint32)
        self._matchers: Sequence[Matcher] = ()
        self.took = 0.0  # seconds of the last masks, by the clock

    def accept_each(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> list[bool]:
        """Let each matcher accept its token. Returns whether it follows the grammar; a matcher that
        fails holds its error."""
        return self._executor.consume_token_par(
            [(matcher.state, token) for matcher, token in zip(matchers, tokens, strict=True)]
        )

    def start_masks(self, matchers: Sequence[Matcher]) -> None:
        """Start to compute the next masks. That of a single matcher is computed in `wait_masks`:
        waking a thread takes longer than most masks."""
        self.settle()
        self._matchers = matchers
        if len(self._bits_RW) < len(matchers):
            self._bits_RW = np.zeros((len(matchers), matchers[0].mask_words), np.uint32)
        if len(matchers) > 1:
            self._job = self._background.submit(self._compute)

    def wait_masks(self) -> np.ndarray:
        """The masks `[R, W]` of the last `start_masks`, as `Matcher.apply_mask` gives them, valid
        until the next one.

        A matcher that failed holds its error and has any mask. Raises whatever native code raises.
        """
        job = self._job
        self._job = None
        if job is not None:
            job.result()
        elif self._matchers:
            start = time.perf_counter()
            self._matchers[0].compute_mask(self._bits_RW[0])
            self.took = time.perf_counter() - start
        return self._bits_RW[: len(self._matchers)]

    def timed_masks(self, matchers: Sequence[Matcher]) -> tuple[np.ndarray, list[float]]:
        """The next masks `[R, W]`, and the seconds of processor time of each."""

        def timed(matcher: Matcher, bits_W: np.ndarray) -> float:
            start = time.thread_time()
            matcher.compute_mask(bits_W)
            return time.thread_time() - start

        self.settle()
        bits_RW = np.zeros((len(matchers), matchers[0].mask_words), np.uint32)
        return bits_RW, list(self._cores.map(timed, matchers, bits_RW))

    def settle(self) -> None:
        """Wait until no thread uses a matcher."""
        self._background.settle()
        self._job = None

    def _compute(self) -> None:
        rows = [(matcher.state, row) for row, matcher in enumerate(self._matchers)]
        bits_RW = self._bits_RW
        start = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(
            rows, bits_RW.ctypes.data, bits_RW.shape[1] * 4, len(bits_RW)
        )
        self.took = time.perf_counter() - start
