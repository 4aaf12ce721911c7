"""Text files that go with a message: by button, by drop, by paste; what is no text is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.tokenizer import Tokenizer
from tests.server.page.conftest import PHONE, answered, ask, script
from tests.server.page.scripted import ScriptedServer

Visit = Callable[..., Any]
DROP = script("drop")
PASTE = script("paste")
WIDE = script("wide")
LONG_NAME = "dropped-with-a-very-long-name-that-does-not-fit-at-all.txt"


def prompt(scripted: ScriptedServer, tokenizer: Tokenizer) -> str:
    """The latest prompt of the engine as text."""
    return tokenizer.decode(scripted.control.added[-1].prompt.tokens, False)


def test_a_file_by_the_button_stands_in_the_message(
    scripted: ScriptedServer, visit: Visit, tokenizer: Tokenizer
) -> None:
    scripted.script.pieces = ["fine"]
    page = visit(scripted.url)
    text = "a\n```\nb\n```\n"
    page.locator("input.attached").set_input_files(
        {"name": "notes.md", "mimeType": "text/markdown", "buffer": text.encode()}
    )
    page.locator(".chips li", has_text="notes.md").wait_for()
    page.locator(".chips small", has_text="tokens").wait_for()
    ask(page, "What is in it?")
    answered(page)
    assert "File: notes.md\n````\na\n```\nb\n```\n````\n\nWhat is in it?" in prompt(
        scripted, tokenizer
    )
    assert page.locator(".bubble").inner_text() == "What is in it?"
    assert page.locator(".chips").is_hidden()
    page.locator(".attachment summary").click()
    assert page.locator(".attachment pre").inner_text().rstrip() == text.rstrip()
    page.reload()
    page.locator(".attachment", has_text="notes.md").wait_for()


def test_files_by_drop_and_paste(
    scripted: ScriptedServer, visit: Visit, tokenizer: Tokenizer
) -> None:
    scripted.script.pieces = ["fine"]
    page = visit(scripted.url, PHONE, expected=("400",))
    page.evaluate(DROP, ["enter", LONG_NAME, "d"])
    page.locator(".dropping").wait_for()
    page.evaluate(DROP, ["drop", LONG_NAME, "d"])
    page.locator(".chips li", has_text="dropped").wait_for()
    assert page.locator(".dropping").count() == 0
    page.evaluate(PASTE, ["pasted.txt", "p"])
    page.locator(".chips li", has_text="pasted.txt").wait_for()
    page.evaluate(PASTE, ["", "long " * 2000])
    page.locator(".chips li", has_text="Pasted text.txt").wait_for()
    page.locator(".chips li", has_text="too long for the model").wait_for()
    assert page.evaluate(WIDE) == []
    page.get_by_role("button", name="Remove Pasted text.txt").click()
    assert page.locator(".chips li").count() == 2
    page.press("#prompt", "Enter")  # files need no words beside them
    answered(page)
    assert "File: pasted.txt\n```\np\n```" in prompt(scripted, tokenizer)
    assert "long long" not in prompt(scripted, tokenizer)


@pytest.mark.parametrize(
    ("name", "kind", "content", "why"),
    [
        ("a.png", "image/png", b"\x89PNG", "is an image file; only text can be sent"),
        ("a.bin", "", b"a\0b", "is no text file"),
        ("a.txt", "text/plain", b"\xff\xff", "is no text file"),
        ("a.txt", "text/plain", b" \n", "is empty"),
        ("a.txt", "text/plain", b"x" * ((1 << 20) + 1), "a file may have 1 MiB"),
    ],
)
def test_what_cannot_be_sent_is_said(
    scripted: ScriptedServer, visit: Visit, name: str, kind: str, content: bytes, why: str
) -> None:
    page = visit(scripted.url)
    page.locator("input.attached").set_input_files(
        {"name": name, "mimeType": kind, "buffer": content}
    )
    page.locator(".prompt > .problem", has_text=why).wait_for()
    assert page.locator(".chips li").count() == 0


def test_a_text_in_utf_16_is_read(scripted: ScriptedServer, visit: Visit) -> None:
    page = visit(scripted.url)
    content = "\ufeffgrün".encode("utf-16-le")
    page.locator("input.attached").set_input_files(
        {"name": "a.txt", "mimeType": "text/plain", "buffer": content}
    )
    scripted.script.pieces = ["fine"]
    page.locator(".chips li").wait_for()
    page.press("#prompt", "Enter")
    answered(page)
    page.locator(".attachment summary").click()
    assert page.locator(".attachment pre").inner_text() == "grün"
