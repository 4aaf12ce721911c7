"""Incremental detokenisation of one request, with stop strings. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from jaxllm.sampling.options import SamplingParams

# Tokens that may wait for the rest of a character; each is decoded again with every next one
MAX_UNDECODED = 8
MAX_TAIL = 256  # ids at the end of a prompt among which its last text is searched
BROKEN = "\ufffd"


class TextStep(msgspec.Struct, frozen=True, gc=False):  # made for every token
    """New text of some tokens that may be sent.

    Attributes:
        text: without anything that could become a stop string.
        stop: the stop string that ended the text.
        count: of a text that was ended, the tokens up to its end.
    """

    text: str
    stop: str | None = None
    count: int = 0


class StopStrings:
    """Finds the first stop string, and holds back text that may be the start of one.

    The stop string that is complete first ends the text; of several, the one that starts first.
    How the text is cut into pieces does not matter. The text ends before the stop string, or after
    it with `include`; then nothing is held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops), default=0)
        # Characters that the start of a stop string can end with
        self._inside = frozenset("".join(stop[:-1] for stop in stops))
        # The end of the text, where it may start a stop string; with `include` it is sent already
        self._open = ""

    def feed(self, new: str, may_end: bool = True) -> TextStep:
        """Add a piece. A stop string that is complete with it ends the text if it `may_end`."""
        text = self._open + new
        shown = 0
        if self._include:
            shown = len(self._open)
        hit = None
        if may_end:
            hit = self._first(text, len(self._open))
        if hit is not None:
            end, start, stop = hit
            self._open = ""
            return TextStep(text[shown : end if self._include else start], stop)
        size = self._beginning(text)
        self._open = text[len(text) - size :]
        return TextStep(text[shown:] if self._include else text[: len(text) - size])

    def finish(self) -> str:
        """The text that was held back."""
        held = ""
        if not self._include:
            held = self._open
        self._open = ""
        return held

    def _first(self, text: str, old: int) -> tuple[int, int, str] | None:
        """(end, start, stop) of the first stop string that ends after `old` characters."""
        found = [
            (at + len(stop), at, stop)
            for stop in self._stops
            if (at := text.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        if found:
            return min(found)
        return None

    def _beginning(self, text: str) -> int:
        """Length of the longest suffix of the text that starts a stop string."""
        if text[-1:] not in self._inside:
            return 0
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


class Detokenizer:
    """The text of one request. `feed` adds tokens; `finish` returns the text that was held back.

    New tokens are decoded together with a tail of earlier ones, since many decoders drop the space
    before the first word of a text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], params: SamplingParams):
        self._tokenizer = tokenizer
        self._skip = params.skip_special_tokens
        self._min_tokens = params.min_tokens
        self._stops = (
            StopStrings(params.stop_strings, params.include_stop_str_in_output)
            if params.stop_strings
            else None
        )
        spaced = self._skip or params.spaces_between_special_tokens
        if spaced:
            self._joined = {}
        else:
            self._joined = {
                id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()
            }
        self._after_added = False
        self._tail = self._tail_of(prompt)  # the last tokens that decode to whole characters
        # Decodes the tokens after the tail; None when it cannot
        self._stream: DecodeStream | None = None
        self._restart()
        self._pending: list[int] = []  # tokens after the tail, within a character
        self._fed = 0

    def feed(self, tokens: list[int]) -> TextStep:
        """Decode `tokens`; the first stop string that comes after `min_tokens` tokens ends the
        text."""
        if self._stops is None:
            return TextStep("".join([self._text_of(token) for token in tokens]))
        shown = ""
        for count, token in enumerate(tokens, 1):
            self._fed += 1
            step = self._stops.feed(self._text_of(token), may_end=self._fed > self._min_tokens)
            shown += step.text
            if step.stop is not None:
                self._pending = []
                return TextStep(shown, step.stop, count)
        return TextStep(shown)

    def finish(self) -> str:
        """The text that was held back: a partial stop string, an incomplete character as U+FFFD."""
        return (self._stops.finish() if self._stops is not None else "") + self._flush()

    def _text_of(self, token: int) -> str:
        """The text that a token adds. Without `spaces_between_special_tokens`, an added token after
        another is its bare content."""
        if not self._joined:
            return self._decode(token)
        text = self._decode(token)
        content = self._joined.get(token)
        if content is not None and self._after_added:
            text = content
        self._after_added = content is not None
        return text

    def _decode(self, token: int) -> str:
        self._pending.append(token)
        text = self._next(token)
        if text is not None:
            self._tail = self._pending
            self._pending = []
            if self._stream is None:
                self._restart()
            return text
        if len(self._pending) == 1 and self._silent(token):
            self._pending = []
            # The stream would keep it and decode it again with every next token
            self._restart()
        if len(self._pending) >= MAX_UNDECODED:
            return self._flush()
        return ""

    def _next(self, token: int) -> str | None:
        """The text that `token` completes, None when there is none yet."""
        if self._stream is not None:
            try:
                return self._stream.step(self._tokenizer, token)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # out of step, or a panic in native code, which is no Exception
                self._stream = None
        text = self._new_text()
        if not text or text.endswith(BROKEN):
            return None
        return text

    def _flush(self) -> str:
        """The pending tokens as they are, although a character is incomplete. The tail stays, so
        that later text keeps its leading space."""
        if not self._pending:
            return ""
        text = self._new_text()
        if not self._text(self._tail):
            self._tail = self._pending[-1:]
        self._pending = []
        self._restart()
        return text

    def _restart(self) -> None:
        """Start a stream after the tail. A tail that ends within a character gets none: the stream
        would repeat its text."""
        broken = self._text(self._tail).endswith(BROKEN)
        if broken:
            self._stream = None
        else:
            self._stream = DecodeStream(ids=self._tail, skip_special_tokens=self._skip)

    def _new_text(self) -> str:
        """The text that the pending tokens add to the tail's. They may complete a character at the
        end of a prompt."""
        before = self._text(self._tail)
        whole = self._text([*self._tail, *self._pending])
        while not whole.startswith(before):
            before = before[:-1]
        return whole[len(before) :]

    def _tail_of(self, prompt: list[int]) -> list[int]:
        """A short suffix of `prompt` whose text starts with a whole character."""
        size = 1
        while size < 2 * min(len(prompt), MAX_TAIL):
            text = self._text(prompt[-size:])
            if text and not text.startswith(BROKEN):
                return prompt[-size:]
            size *= 2
        return prompt[-MAX_UNDECODED:]

    def _silent(self, token: int) -> bool:
        """Whether `token` has no text: a skipped special token, or an id without a token."""
        if self._tokenizer.id_to_token(token) is None:
            return True
        return (
            self._skip
            and not self._text([token])
            and self._tokenizer.decode([token], skip_special_tokens=False) != ""
        )

    def _text(self, ids: list[int]) -> str:
        """`ids` decoded; U+FFFD where native code panics, which is no Exception."""
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            return BROKEN
