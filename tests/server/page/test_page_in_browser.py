"""Around the talk: the model's card, the context, the list of conversations, settings, the key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxllm.server.model_notes import ModelNotes
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import with_settings
from tests.server.page.conftest import PHONE, answered, ask, script
from tests.server.page.scripted import WAIT, ScriptedServer

Visit = Callable[..., Any]


@pytest.fixture
def noted(scripted: ScriptedServer) -> Iterator[ScriptedServer]:
    """A server whose model's folder says something about it."""
    scripted.script.pieces = ["fine"]
    scripted.server_state.notes = ModelNotes("Knows <b>sums</b>.", ("What is 1 + 1?", "Count."))
    yield scripted
    scripted.server_state.notes = ModelNotes()


def test_the_welcome_says_what_the_model_is_and_offers_what_fits_it(
    noted: ScriptedServer, visit: Visit
) -> None:
    page = visit(noted.url)
    page.locator(".welcome .about", has_text="Knows <b>sums</b>.").wait_for()
    assert page.locator(".welcome h1").inner_text() == "Talk to fake"
    limit = f"{noted.server_state.resolved.max_model_len:,} tokens of context"
    assert limit in page.locator(".card-line").inner_text()
    assert page.locator(".example").all_inner_texts() == ["What is 1 + 1?", "Count."]
    page.locator(".example").first.click()
    answered(page)
    assert page.locator(".bubble").inner_text() == "What is 1 + 1?"


@pytest.mark.parametrize("viewport", [PHONE, {"width": 320, "height": 600}])
def test_long_words_of_a_models_card_stay_on_the_screen(
    noted: ScriptedServer, visit: Visit, viewport: dict[str, int]
) -> None:
    noted.server_state.notes = ModelNotes("D" * 300, ("E" * 180, "F" * 180))
    page = visit(noted.url, viewport)
    page.locator(".welcome button", has_text="EEE").wait_for()
    assert page.evaluate(script("wide")) == []


def test_the_context_that_is_used_is_shown(scripted: ScriptedServer, visit: Visit) -> None:
    scripted.script.pieces = ["one ", "two"]
    page = visit(scripted.url)
    assert page.locator(".context").is_hidden()
    ask(page, "hello")
    answered(page)
    tokens = len(scripted.control.added[-1].prompt.tokens) + 2
    most = scripted.server_state.resolved.max_model_len
    assert page.locator(".context").inner_text() == f"{tokens:,} of {most:,} tokens"
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".context").is_hidden()


def test_a_caret_waits_and_goes_on_with_the_text(scripted: ScriptedServer, visit: Visit) -> None:
    scripted.script.pieces = [WAIT, "- some\n- text", WAIT, " more"]
    scripted.script.go_on.clear()
    page = visit(scripted.url)
    ask(page, "hello")
    page.locator(".wait .caret").wait_for()
    stop = page.get_by_role("button", name="Stop")
    assert stop.locator("svg").evaluate("node => getComputedStyle(node).fill") != "none"
    scripted.script.go_on.set()
    answered(page)
    assert page.locator(".wait").is_hidden()
    assert page.locator(".live").count() == 0


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("some text", "p:last-child"),
        ("- a\n- b", "ul > li:last-child"),
        ("- a\n  - b", "ul ul > li:last-child"),
        ("```py\nx", "figure code"),
        ("> a", "blockquote > p"),
        ("# a", "h3"),
    ],
)
def test_the_caret_stands_behind_the_last_word(
    scripted: ScriptedServer, visit: Visit, text: str, place: str
) -> None:
    scripted.script.pieces = [text, WAIT, " more"]
    scripted.script.go_on.clear()
    page = visit(scripted.url)
    ask(page, "hello")
    caret = page.locator(f".live {place}")
    caret.wait_for()
    width = "node => getComputedStyle(node, '::after').width"
    assert caret.evaluate(width) == "9px"
    carets = """() => [...document.querySelectorAll(".live, .live *")]
      .filter((node) => getComputedStyle(node, "::after").content !== "none").length"""
    assert page.evaluate(carets) == 1
    scripted.script.go_on.set()
    answered(page)


def talk(page: Any, *texts: str) -> None:
    """A conversation for each text."""
    for number, text in enumerate(texts):
        if number:
            page.get_by_role("button", name="New chat").click()
        ask(page, text)
        answered(page)
        page.locator(".conversations .open", has_text=text).wait_for()


def test_conversations_are_searched_by_all_that_was_said(
    scripted: ScriptedServer, visit: Visit
) -> None:
    scripted.script.pieces = ["the needle is <b>here</b>"]
    page = visit(scripted.url)
    talk(page, "first talk")
    scripted.script.pieces = ["nothing"]
    page.get_by_role("button", name="New chat").click()
    talk(page, "second talk")
    page.keyboard.press("Control+k")
    page.keyboard.type("NEEDLE")
    page.locator(".conversations mark", has_text="needle").wait_for()
    titles = page.locator(".conversations .title")
    assert titles.all_inner_texts() == ["first talk"]
    assert "<b>here</b>" in page.locator(".piece").inner_text()
    page.get_by_label("Search conversations").fill("no such word")
    page.locator(".conversations .empty", has_text="Nothing found.").wait_for()
    page.keyboard.press("Escape")
    titles.nth(1).wait_for()
    assert page.locator(".age").all_inner_texts() == ["Today"]


def test_a_conversation_is_renamed_and_keeps_its_name(
    scripted: ScriptedServer, visit: Visit
) -> None:
    scripted.script.pieces = ["fine"]
    page = visit(scripted.url)
    talk(page, "hello")
    page.get_by_role("button", name="More about “hello”").click()
    assert page.evaluate("document.activeElement.textContent") == "Rename"
    page.keyboard.press("Escape")
    assert page.locator(".menu-list").count() == 0
    page.get_by_role("button", name="More about “hello”").press("Enter")
    page.keyboard.press("Enter")
    page.get_by_label("Title of the conversation").fill("<i>mine</i>")
    page.keyboard.press("Enter")
    page.locator(".conversations .title", has_text="<i>mine</i>").wait_for()
    page.locator("#prompt").press("ArrowUp")
    page.get_by_label("Edit your message").fill("other")
    page.get_by_label("Edit your message").press("Control+Enter")
    answered(page)
    page.reload()
    page.locator(".conversations .title", has_text="<i>mine</i>").wait_for()
    page.locator(".conversations .open").press("F2")
    page.get_by_label("Title of the conversation").fill("dropped")
    page.keyboard.press("Escape")
    assert page.locator(".conversations .title").all_inner_texts() == ["<i>mine</i>"]


def test_one_conversation_is_exported_and_deleted_by_its_menu(
    scripted: ScriptedServer, visit: Visit
) -> None:
    scripted.script.pieces = ["fine"]
    page = visit(scripted.url, PHONE)
    ask(page, "hello there")
    answered(page)
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="More about “hello there”").click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name="Export").click()
    assert download.value.suggested_filename == "hello-there.json"
    page.get_by_role("button", name="More about “hello there”").click()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator(".conversations .empty").wait_for(state="attached")


def test_settings_show_what_the_server_takes_for_an_empty_field(
    tokenizer: Tokenizer, visit: Visit
) -> None:
    with ScriptedServer(tokenizer, defaults={"temperature": 0.6, "top_k": 20}) as running:
        page = visit(running.url)
        page.locator(".model option").first.wait_for(state="attached")
        page.get_by_role("button", name="Settings").first.click()
        placeholders = [
            page.get_by_label(name).get_attribute("placeholder")
            for name in ("Temperature", "Top k", "Top p", "Presence penalty", "Repetition penalty")
        ]
        page.get_by_label("Temperature").fill("0.1")
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_role("button", name="Leave all to the server").click()
        assert page.get_by_label("Temperature").input_value() == ""
        assert page.get_by_label("System prompt").input_value() == ""
    assert placeholders == ["0.6", "20", "1", "0", "1"]


def test_the_key_is_asked_for_only_where_there_is_one(
    scripted: ScriptedServer, tokenizer: Tokenizer, visit: Visit
) -> None:
    page = visit(scripted.url)
    page.locator(".model option").first.wait_for(state="attached")
    assert page.get_by_role("button", name="API key").count() == 0
    with ScriptedServer(tokenizer, with_settings(api_keys=("right",))) as running:
        locked = visit(running.url, expected=("401",))
        locked.get_by_role("dialog").get_by_label("API key", exact=True).fill("right")
        locked.keyboard.press("Enter")
        locked.locator(".model option").first.wait_for(state="attached")
        assert locked.get_by_role("button", name="API key").is_visible()


def test_a_new_page_shows_what_the_engine_did_before(tokenizer: Tokenizer, visit: Visit) -> None:
    with ScriptedServer(tokenizer) as scripted:
        seen_before(scripted, visit)


def seen_before(scripted: ScriptedServer, visit: Visit) -> None:
    """Do something, then look at the engine."""
    scripted.script.pieces = ["some "] * 20
    page = visit(scripted.url)
    ask(page, "hello")
    answered(page)
    for _ in range(30):
        scripted.server_state.recorder.sample()
    page.get_by_role("button", name="Engine").click()
    page.locator(".pill", has_text="live").wait_for()
    share = """node => {
      const { width, height } = node;
      const { data } = node.getContext("2d").getImageData(0, 0, width, height);
      const columns = new Set();  // with a pixel of the series, which is darker than the grid
      for (let at = 0; at < data.length; at += 4)
        if (data[at + 3] > 200 && data[at] < 160) columns.add((at >> 2) % width);
      return columns.size / width; }"""
    chart = page.locator(".chart.running")
    assert 0.2 < chart.evaluate(share) < 0.5  # of two minutes, some thirty samples
    latency = page.locator("#engine table").first.inner_text()
    assert re.search(r"TTFT\s+(<|>|[\d.]+–)", latency), latency
    page.get_by_role("button", name="Close the engine view").click()


def test_shortcuts_are_listed_and_work(scripted: ScriptedServer, visit: Visit) -> None:
    scripted.script.pieces = ["fine"]
    page = visit(scripted.url)
    talk(page, "hello")
    page.get_by_role("button", name="Keyboard shortcuts").click()
    page.get_by_role("dialog", name="Keyboard shortcuts").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("Control+Shift+O")
    page.locator(".welcome").wait_for()
    page.locator(".messages").focus()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("/?")
    assert page.locator("#prompt").input_value() == "/?"


def test_a_text_from_the_right_is_set_from_the_right(
    scripted: ScriptedServer, visit: Visit
) -> None:
    scripted.script.pieces = ["مرحبا بالعالم\n\n- عنصر\n\nand English"]
    page = visit(scripted.url)
    ask(page, "مرحبا")
    answer = answered(page)
    direction = "node => getComputedStyle(node).direction"
    assert page.locator(".bubble").evaluate(direction) == "rtl"
    assert answer.locator("ul").evaluate(direction) == "rtl"
    paragraphs = answer.locator(".markdown p")
    assert [p.evaluate(direction) for p in paragraphs.all()] == ["rtl", "ltr"]


def test_thinking_is_switched_at_the_prompt_where_the_template_can(
    scripted: ScriptedServer, visit: Visit
) -> None:
    scripted.script.pieces = ["fine"]
    scripted.server_state.has_thinking_switch = False
    page = visit(scripted.url)
    page.locator(".model option").first.wait_for(state="attached")
    assert page.locator(".think").is_hidden()
    scripted.server_state.has_thinking_switch = True
    page.reload()
    bodies: list[str] = []
    page.on("request", lambda request: bodies.append(request.post_data or ""))
    page.get_by_role("button", name="Thinking: as the server decides").click()
    page.get_by_role("button", name="Thinking: on").wait_for()
    ask(page, "hello")
    answered(page)
    page.get_by_role("button", name="Thinking: on").click()
    page.get_by_role("button", name="Settings").first.click()
    assert page.get_by_label("Thinking", exact=True).input_value() == "off"
    assert any('"enable_thinking":true' in body for body in bodies)


def test_an_answer_that_is_written_says_how_far_it_is(
    scripted: ScriptedServer, visit: Visit
) -> None:
    scripted.script.pieces = ["one ", "two ", WAIT, "three"]
    scripted.script.go_on.clear()
    page = visit(scripted.url)
    ask(page, "hello")
    page.locator(".hint", has_text="2 tokens").wait_for()
    scripted.script.go_on.set()
    answered(page)
    page.locator(".hint", has_text="Answers can be wrong.").wait_for()


def beside(page: Any) -> Any:
    """Another tab of the same browser."""
    other = page.context.new_page()
    other.goto(page.url)
    other.locator(".conversations .open").first.wait_for()
    return other


def test_what_two_tabs_say_in_a_conversation_is_kept_in_two(
    scripted: ScriptedServer, visit: Visit
) -> None:
    scripted.script.pieces = ["fine"]
    page = visit(scripted.url)
    ask(page, "one")
    answered(page)
    other = beside(page)
    ask(other, "two")
    answered(other, 2)
    other.locator(".conversations .open").first.wait_for()
    ask(page, "three")
    answered(page, 2)
    page.locator(".banner", has_text="goes on as a copy").wait_for()
    titles = page.locator(".conversations .open")
    assert titles.count() == 2
    said = []
    for number in range(2):
        titles.nth(number).click()
        titles.nth(number).and_(page.locator("[aria-current]")).wait_for()
        said.append([text.strip() for text in page.locator(".question").all_inner_texts()])
    assert sorted(said) == [["one", "three"], ["one", "two"]]


def test_a_conversation_that_another_tab_deleted_is_said_to_be_gone(
    scripted: ScriptedServer, visit: Visit
) -> None:
    scripted.script.pieces = ["fine"]
    page = visit(scripted.url)
    for text in ("first", "second"):
        ask(page, text)
        answered(page)
        page.get_by_role("button", name="New chat").click()
    other = beside(page)
    other.get_by_role("button", name="More about “first”").click()
    other.get_by_role("menuitem", name="Delete").click()
    other.get_by_role("button", name="Delete", exact=True).click()
    other.locator(".open", has_text="first").wait_for(state="detached")
    page.locator(".open", has_text="first").click()
    page.locator(".banner", has_text="deleted in another tab").wait_for()
    assert page.locator(".conversations .open").all_inner_texts() == ["second"]


def test_a_browser_without_space_says_why_a_conversation_is_not_kept_until_it_is(
    scripted: ScriptedServer, visit: Visit
) -> None:
    scripted.script.pieces = ["fine"]
    full = """const put = IDBObjectStore.prototype.put;
    window.full = true;
    IDBObjectStore.prototype.put = function (...all) {
      const request = put.apply(this, all);
      if (window.full) this.transaction.abort();
      return request;
    };"""
    page = visit(scripted.url, before=full)
    ask(page, "hello")
    answered(page)
    page.locator(".banner", has_text="This conversation is not kept").wait_for()
    page.evaluate("window.full = false")
    ask(page, "again")
    answered(page, 2)
    page.locator(".banner").wait_for(state="hidden")
    assert page.locator(".conversations .open").count() == 1


def test_an_import_that_succeeds_takes_back_that_one_failed(
    scripted: ScriptedServer, visit: Visit, tmp_path: Any
) -> None:
    page = visit(scripted.url)
    page.locator(".model option").first.wait_for(state="attached")  # else it clears the banner
    (tmp_path / "bad.json").write_text("{")
    page.locator("input.imported").set_input_files(tmp_path / "bad.json")
    page.locator(".banner", has_text="Not imported").wait_for()
    (tmp_path / "good.json").write_text('{"title": "good", "messages": []}')
    page.locator("input.imported").set_input_files(tmp_path / "good.json")
    page.locator(".banner").wait_for(state="hidden")
    assert page.locator(".conversations .open").all_inner_texts() == ["good"]
