"""Tokens to text, one request at a time: incremental decoding, stop strings, held-back partial matches. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

MAX_UNDECODED = 8  # tokens that may wait for the rest of a character; each of them is decoded again with every next one
MAX_TAIL = 256  # ids at the end of a prompt among which its last text is looked for
BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class TextStep:
    """Text that is safe to show after some tokens, and the stop string that ended the request, if one did."""

    text: str
    stop: str | None = None


class Detokenizer:
    """Text of one request. `feed` takes new tokens; `finish` gives what was held back.

    New tokens are decoded together with a tail of earlier ones, since many decoders drop the space in front of a text's first word.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], skip_special: bool, stops: list[str], min_tokens: int = 0):
        self._tokenizer, self._skip, self._stops = tokenizer, skip_special, stops
        self._tail = self._tail_of(prompt)  # the last tokens that are whole text
        self._stream: DecodeStream | None = None  # decodes what follows the tail; None when it cannot
        self._restart()
        self._pending: list[int] = []  # tokens after the tail that end within a character
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
        text = self._next(token)
        if text is not None:
            self._tail, self._pending = self._pending, []
            if self._stream is None:
                self._restart()
            return text
        if len(self._pending) == 1 and self._silent(token):
            self._pending = []
            self._restart()  # else the stream would hold it, and decode it again with every next token
        return self._flush() if len(self._pending) >= MAX_UNDECODED else ""

    def _next(self, token: int) -> str | None:
        """The text that `token` completes, None when there is none yet."""
        if self._stream is not None:
            try:
                return self._stream.step(self._tokenizer, token)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # the stream lost its place, or native code panicked, which is no Exception
                self._stream = None
        text = self._new_text()
        return None if not text or text.endswith(BROKEN) else text

    def _flush(self) -> str:
        """Give up on completing a character: show what is pending as it is. The tail stays, so that what follows keeps its space."""
        if not self._pending:
            return ""
        text = self._new_text()
        if not self._text(self._tail):
            self._tail = self._pending[-1:]
        self._pending = []
        self._restart()
        return text

    def _restart(self) -> None:
        """Start a stream after the tail. A tail that ends within a character would be shown with the rest of it, so it gets none."""
        broken = self._text(self._tail).endswith(BROKEN)
        self._stream = None if broken else DecodeStream(ids=self._tail, skip_special_tokens=self._skip)

    def _new_text(self) -> str:
        """What the pending tokens add to the tail's text; a broken character at the end of a prompt may have become a whole one."""
        before, whole = self._text(self._tail), self._text([*self._tail, *self._pending])
        while not whole.startswith(before):
            before = before[:-1]
        return whole[len(before) :]

    def _tail_of(self, prompt: list[int]) -> list[int]:
        """The shortest of some endings of `prompt` that is text from its first character on."""
        size = 1
        while size < 2 * min(len(prompt), MAX_TAIL):
            text = self._text(prompt[-size:])
            if text and not text.startswith(BROKEN):
                return prompt[-size:]
            size *= 2
        return prompt[-MAX_UNDECODED:]

    def _silent(self, token: int) -> bool:
        """Whether `token` is never text: a special token that is skipped, or an id without a token."""
        if self._tokenizer.id_to_token(token) is None:
            return True
        return self._skip and not self._text([token]) and self._tokenizer.decode([token], skip_special_tokens=False) != ""

    def _text(self, ids: list[int]) -> str:
        """`ids` decoded; U+FFFD where native code fails on them, whose panic is no Exception."""
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            return BROKEN
