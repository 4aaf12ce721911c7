"""Harmony, the format of gpt-oss: messages with a channel and perhaps a recipient.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.name
<|constrain|>json<|message|>{…}<|call|>. Prompts end with <|start|>assistant.
"""

from __future__ import annotations

import re
from typing import ClassVar

from jaxllm.server.parsing.machine import Clear, Machine, Malformed, Reading
from jaxllm.server.parsing.markers import Markers
from jaxllm.server.parsing.parts import Text

CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
START = "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")

_BEGIN = Markers((CHANNEL, START, *ENDS))
_END = Markers((*ENDS, START, CHANNEL))
_WORDS = re.compile(r"[^<]*").match
_TO = r"(?:\s*to=(?:functions\.([\w.:/-]+)|([\w.:/-]+)))?"
_BUILT_IN = re.compile(r"(?:python|browser|container)[\w.]*").fullmatch
_HEADER = re.compile(
    rf"(?:<\|start\|>assistant)?{_TO}(?:<\|channel\|>(analysis|commentary|final))?{_TO}"
    r"\s*(?:<\|constrain\|>)?\s*(?:json|code|text)?\s*",
    re.IGNORECASE,
).fullmatch


class Harmony(Machine):
    """Reads reasoning, reply and calls.

    Attributes:
        calls: messages to functions are calls, which `function_call` reads; else they are text.
    """

    calls: ClassVar[bool] = False

    def read(self) -> Reading[None]:
        first = yield from self.take(" to=")
        if first is not None:
            yield from self.attempt(self.message(first), first)
        while True:
            marker = yield from self.until(_BEGIN, self.emit_text, Clear(Text, _BEGIN.hot))
            if marker is None:
                return
            if marker in (CHANNEL, START):
                yield from self.attempt(self.message(marker), marker)

    def message(self, marker: str) -> Reading[None]:
        """One message, from behind the marker that begins it. Raises Malformed."""
        header = marker
        while True:
            header += yield from self.matching(_WORDS)
            word = yield from self.take(CHANNEL, "<|constrain|>", MESSAGE)
            if word is None or len(header) > 1024:
                raise Malformed
            if word == MESSAGE:
                break
            header += word
        fields = _HEADER(header)
        if fields is None:
            raise Malformed
        function = fields[1] or fields[4]
        bare = fields[2] or fields[5]  # without the namespace, which models forget
        if bare and self.has_function(bare):
            function = bare
        elif bare and not _BUILT_IN(bare):
            raise Malformed
        if function and self.calls:
            yield from self.function_call(function)
            return
        self.decide()
        if fields[3] == "analysis":
            self.thinking = True
            end = yield from self.thought(_END)
            self.thinking = False
        else:
            end = yield from self.until(_END, self.emit_text, Clear(Text, _END.hot))
        if end in (CHANNEL, START):
            self.give_back(end)

    def has_function(self, name: str) -> bool:
        """Whether messages to this recipient are calls."""
        return False

    def function_call(self, name: str) -> Reading[None]:
        """The rest of a message that is a call. Raises Malformed."""
        raise NotImplementedError
