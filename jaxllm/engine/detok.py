"""Tokens to text, one request at a time: incremental decoding, stop strings, held-back partial matches. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

MAX_UNDECODED = 8  # tokens that may wait for the rest of a character; DecodeStream is quadratic in what it holds back


@dataclass(frozen=True, slots=True)
class TextStep:
    """Text that is safe to show after some tokens, and the stop string that ended the request, if one did."""

    text: str
    stop: str | None = None


class Detokenizer:
    """Text of one request. `feed` takes new tokens; `finish` gives what was held back."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], skip_special: bool, stops: list[str], min_tokens: int = 0):
        self._tokenizer, self._skip, self._stops = tokenizer, skip_special, stops
        self._tail = prompt[-MAX_UNDECODED:]
        self._stream = DecodeStream(ids=self._tail, skip_special_tokens=skip_special)
        self._pending: list[int] = []  # tokens the stream holds back
        self._held = ""  # text that may be the start of a stop string
        self._longest = max(map(len, stops), default=0)
        self._min_tokens = min_tokens
        self._fed = 0

    def feed(self, tokens: list[int]) -> TextStep:
        """Decode `tokens`; a stop string ends the text just before it and is never shown."""
        for token in tokens:
            self._fed += 1
            step = self._release(self._held + self._decode(token))
            if step is not None:
                return step
        shown = self._held[: len(self._held) - self._keep()]
        self._held = self._held[len(shown) :]
        return TextStep(shown)

    def finish(self) -> str:
        """What was held back: a partial stop string, and an incomplete character as U+FFFD."""
        text, self._held = self._held + self._flush(), ""
        return text

    def _release(self, text: str) -> TextStep | None:
        """Set `_held` to all text so far, or cut at the earliest stop string."""
        self._held = text
        if self._fed < self._min_tokens:
            return None
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return None
        at, stop = min(found, key=lambda hit: hit[0])
        self._held = ""
        self._pending = []
        return TextStep(text[:at], stop)

    def _keep(self) -> int:
        """Length of the longest suffix of the held text that starts a stop string."""
        for size in range(min(self._longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0

    def _decode(self, token: int) -> str:
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # "Invalid prefix encountered": the stream lost its place, start it anew
            return self._flush()
        if text is None:
            return self._flush() if len(self._pending) >= MAX_UNDECODED else ""
        self._tail, self._pending = [token], []
        return text

    def _flush(self) -> str:
        """Give up on completing a character: decode what is pending as it is and start a new stream."""
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._tail, skip_special_tokens=self._skip)
        whole = self._tokenizer.decode(self._tail + self._pending, skip_special_tokens=self._skip)
        text = whole[len(before) :] if whole.startswith(before) else self._tokenizer.decode(self._pending, skip_special_tokens=self._skip)
        self._tail, self._pending = self._pending[-1:], []
        self._stream = DecodeStream(ids=[], skip_special_tokens=self._skip)
        return text
