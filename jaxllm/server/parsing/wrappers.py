"""Tags that some models put around their whole reply, behind the thought: <answer>…</answer>."""

from __future__ import annotations

from collections.abc import Container

from jaxllm.server.parsing.machine import Clear, Machine, Reading
from jaxllm.server.parsing.markers import NEWLINES, NONE, Markers
from jaxllm.server.parsing.parts import Part, Text

NAMES = ("answer", "response")


def find_wrappers(template: str | None, others: Container[str] = ()) -> tuple[str, ...]:
    """Names of the tags around replies that a chat template has, but for those that it has for
    something else. Others are text, for users ask for such tags themselves."""
    text = template or ""
    names = (name for name in NAMES if name not in others)
    return tuple(name for name in names if f"<{name}>" in text or f"</{name}>" in text)


class Unwrapped(Machine):
    """Takes off a tag with which the reply begins, and its closer where the reply or its text
    before a call ends, with newlines beside them."""

    def __init__(self, names: tuple[str, ...]):
        """`names`: of the tags that may be taken off."""
        self._names = {f"<{name}>": name for name in names}
        super().__init__()

    def pause(self) -> list[Part]:
        """What is certain when a call comes next, and perhaps more text behind it."""
        parts = self.finish()
        self._ended = False
        return parts

    def read(self) -> Reading[None]:
        before = yield from self.blank("")
        tag = yield from self.take(*self._names)
        if tag is None:
            self.emit_text(before)
        else:
            yield from self.inside(tag, f"</{self._names[tag]}>")
        self.over = True
        while True:
            yield from self.until(NONE, self.emit_text, Clear(Text, NONE.hot))
            yield

    def inside(self, tag: str, closer: str) -> Reading[None]:
        """Text from behind the reply's tag up to its closer, which is text if more follows."""
        words = [before + closer for before in NEWLINES]
        markers = Markers((tag, *words))
        depth = 1
        while (yield from self.character()) == "\n":
            yield from self.take("\n")
        while True:
            marker = yield from self.until(markers, self.emit_text, Clear(Text, markers.hot))
            if marker is None:  # a pause
                yield
                continue
            if marker == tag:
                depth += 1
            else:
                depth -= 1
            if depth:
                self.emit_text(marker)
                continue
            text = yield from self.blank(marker)
            if (yield from self.character()) == "":
                yield
            else:
                self.emit_text(text)
            return

    def blank(self, before: str) -> Reading[str]:
        """Takes white space. → it, behind other text."""
        self._undecided = [before]
        yield from self.spaces()
        text = "".join(self._undecided)
        self._undecided = None
        return text
