"""Versions of an answer: a retry and an edit keep what was there, and the reader can go back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jaxllm.tokenizer import Tokenizer
from tests.server.page.conftest import answered, ask
from tests.server.page.scripted import WAIT, ScriptedServer

Visit = Callable[..., Any]
# Whether the answer of the only conversation is kept as it is shown
KEPT = """async (text) => {
  const { openStore } = await import("./page/lib/store.js");
  const store = await openStore();
  const [head] = await store.list();
  return (await store.load(head.id)).messages[1].content === text; }"""


def texts(page: Any, kind: str) -> list[str]:
    """The texts of all questions or answers that are shown."""
    return [text.strip() for text in page.locator(kind).all_text_contents()]


def retry(page: Any, scripted: ScriptedServer, answer: str) -> None:
    """Generate the last answer anew."""
    scripted.script.pieces = [answer]
    page.get_by_role("button", name="Try again").last.click()
    page.locator(".answer", has_text=answer).wait_for()
    answered(page)


def test_a_retry_keeps_the_first_answer(scripted: ScriptedServer, visit: Visit) -> None:
    scripted.script.pieces = ["one"]
    page = visit(scripted.url)
    ask(page, "first")
    answered(page)
    assert page.locator(".versions").count() == 0
    retry(page, scripted, "two")
    assert page.locator(".versions").inner_text() == "2/2"
    page.get_by_role("button", name="Version before").click()
    assert texts(page, ".answer .markdown:not(.thinking *)") == ["one"]
    assert page.get_by_role("button", name="Version before").is_disabled()
    focused = "document.activeElement.getAttribute('aria-label')"
    assert page.evaluate(focused) == "Version after"  # the keyboard stays where it was
    page.keyboard.press("Enter")
    assert texts(page, ".answer .markdown:not(.thinking *)") == ["two"]


def test_an_edit_keeps_the_first_question_and_all_behind_it(
    scripted: ScriptedServer, visit: Visit
) -> None:
    scripted.script.pieces = ["one"]
    page = visit(scripted.url)
    ask(page, "first")
    answered(page)
    retry(page, scripted, "two")
    page.locator(".question").hover()
    page.get_by_role("button", name="Edit this message").click()
    page.get_by_label("Edit your message").fill("second")
    scripted.script.pieces = ["three"]
    page.get_by_label("Edit your message").press("Control+Enter")
    page.locator(".answer", has_text="three").wait_for()
    answered(page)
    assert texts(page, ".bubble") == ["second"]
    assert page.locator(".answer").count() == 1
    page.locator(".question .versions button").first.click()
    assert texts(page, ".bubble") == ["first"]
    assert texts(page, ".versions") == ["1/2", "2/2"]  # the answer's versions came back too
    page.locator(".answer .versions button").first.click()
    assert "one" in str(page.locator(".answer").text_content())


def test_versions_outlive_a_reload_an_export_and_an_import(
    scripted: ScriptedServer, visit: Visit, tmp_path: Any
) -> None:
    scripted.script.pieces = ["one"]
    page = visit(scripted.url)
    ask(page, "first")
    answered(page)
    retry(page, scripted, "two")
    page.locator(".conversations .open").wait_for()
    page.get_by_role("button", name="Version before").click()
    page.wait_for_function(KEPT, arg="one")
    page.reload()
    assert "one" in str(answered(page).text_content())
    assert page.locator(".versions").inner_text() == "1/2"
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all conversations").click()
    download.value.save_as(tmp_path / "kept.json")
    other = visit(scripted.url)
    other.locator("input.imported").set_input_files(tmp_path / "kept.json")
    other.locator(".conversations .open").click()
    other.get_by_role("button", name="Version after").click()
    assert "two" in str(answered(other).text_content())
    for wrong in ({"at": 0, "tails": [[], None]}, {"at": 5, "tails": [None]}, {"tails": None}, 1):
        conversation = json.loads((tmp_path / "kept.json").read_text())
        conversation[0]["messages"][1]["fork"] = wrong
        (tmp_path / "wrong.json").write_text(json.dumps(conversation))
        other.locator("input.imported").set_input_files(tmp_path / "wrong.json")
        other.locator(".banner", has_text="holds no conversations").wait_for()
        other.evaluate("document.querySelector('.banner').textContent = ''")


def test_another_answer_can_be_asked_for_while_one_is_written(
    scripted: ScriptedServer, visit: Visit
) -> None:
    scripted.script.pieces = ["old"]
    page = visit(scripted.url)
    ask(page, "first")
    answered(page)
    scripted.script.pieces = ["half ", WAIT, "never"]
    scripted.script.go_on.clear()
    page.get_by_role("button", name="Try again").click()
    page.locator(".answer", has_text="half").wait_for()
    page.locator("#prompt").press("ArrowUp")
    scripted.script.pieces = ["new"]
    page.get_by_label("Edit your message").fill("second")
    page.get_by_label("Edit your message").press("Control+Enter")
    scripted.script.go_on.set()
    page.locator(".answer", has_text="new").wait_for()
    answered(page)
    page.locator(".question .versions button").first.click()
    assert "You stopped this answer." in str(page.locator(".answer").text_content())
    assert texts(page, ".versions") == ["1/2", "2/2"]


def test_an_answer_that_was_stopped_goes_on_where_it_ended(
    scripted: ScriptedServer, visit: Visit, tokenizer: Tokenizer
) -> None:
    scripted.script.pieces = ["begun ", WAIT, "never"]
    scripted.script.go_on.clear()
    page = visit(scripted.url)
    ask(page, "first")
    page.locator(".answer", has_text="begun").wait_for()
    page.keyboard.press("Escape")
    answered(page)
    scripted.script.pieces = ["and ended"]
    scripted.script.go_on.set()
    page.get_by_role("button", name="Continue this answer").click()
    page.locator(".answer", has_text="begun and ended").wait_for()
    answered(page)
    prompt = tokenizer.decode(scripted.control.added[-1].prompt.tokens, False)
    assert prompt.rstrip().endswith("begun")
    assert "You stopped" not in str(page.locator(".answer").text_content())
    assert page.get_by_role("button", name="Continue this answer").count() == 0


def test_a_reader_who_scrolls_up_stays_there(scripted: ScriptedServer, visit: Visit) -> None:
    lines = "\n\n".join(f"line {number}" for number in range(100))
    scripted.script.pieces = [lines, WAIT, "\n\n" + lines]
    scripted.script.go_on.clear()
    page = visit(scripted.url)
    ask(page, "Talk.")
    page.locator(".answer", has_text="line 99").wait_for()
    at_end = """() => { const list = document.querySelector(".messages");
      return list.scrollHeight - list.scrollTop - list.clientHeight < 5; }"""
    page.wait_for_function(at_end)
    page.locator(".messages").hover()
    page.mouse.wheel(0, -600)
    page.get_by_role("button", name="Latest").wait_for()
    scripted.script.go_on.set()
    answered(page)
    assert not page.evaluate(at_end)
    page.get_by_role("button", name="Latest").click()
    page.wait_for_function(at_end)


def test_a_long_message_is_folded_and_the_answer_in_view(
    scripted: ScriptedServer, visit: Visit
) -> None:
    scripted.script.pieces = ["fine"]
    page = visit(scripted.url)
    ask(page, "line\n" * 40)
    answered(page)
    page.wait_for_function(
        """() => { const list = document.querySelector(".messages");
      return list.scrollHeight - list.scrollTop - list.clientHeight < 5; }"""
    )
    height = page.locator(".bubble").bounding_box()["height"]
    assert height < 300
    page.get_by_role("button", name="Show all").click()
    assert page.locator(".bubble").bounding_box()["height"] > 2 * height
    page.get_by_role("button", name="Show less").click()
    assert page.locator(".bubble").bounding_box()["height"] == height
