"""Talking to a model in a real browser: type, stream, stop, edit, reload, and what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.tokenizer import Tokenizer
from tests.server.harness import Running, with_settings
from tests.server.page.conftest import answered, ask
from tests.server.page.scripted import WAIT, ScriptedServer

Visit = Callable[..., Any]
HOSTILE = """<img src=x onerror="window.harmed=1"><script>window.harmed=1</script>
[one](javascript:window.harmed=1) ![two](https://example.org/x.png) <b onclick=x>bold</b>"""


def sent(running: Running) -> list[int]:
    """The latest prompt of the engine."""
    return running.control.added[-1].prompt.tokens


def test_an_answer_streams_and_stays_after_a_reload(scripted: ScriptedServer, visit: Visit) -> None:
    scripted.script.pieces = ["Some **bold** ", WAIT, "words."]
    scripted.script.go_on.clear()
    page = visit(scripted.url)
    ask(page, "Say something.")
    page.locator(".answer strong", has_text="bold").wait_for()
    assert page.get_by_role("button", name="Stop").is_visible()
    scripted.script.go_on.set()
    assert answered(page).locator(".markdown").last.text_content() == "Some bold words."
    assert page.locator("#status").inner_text() == "Answer: Some **bold** words."
    page.locator(".conversations .open", has_text="Say something.").wait_for()
    page.reload()
    assert answered(page).locator("strong").text_content() == "bold"
    assert page.locator(".bubble").inner_text() == "Say something."


def test_escape_stops_an_answer_and_the_engine(scripted: ScriptedServer, visit: Visit) -> None:
    scripted.script.pieces = ["begun ", WAIT, "ended"]
    scripted.script.go_on.clear()
    aborted = len(scripted.control.aborted)
    page = visit(scripted.url)
    ask(page, "Talk.")
    page.locator(".answer", has_text="begun").wait_for()
    page.keyboard.press("Escape")
    assert "You stopped this answer." in answered(page).text_content()
    assert page.get_by_role("button", name="Send", exact=True).is_visible()
    scripted.script.go_on.set()
    assert scripted.control.saw(lambda: len(scripted.control.aborted) == aborted + 1)


def test_settings_are_sent_and_wrong_ones_are_not(
    scripted: ScriptedServer, visit: Visit, tokenizer: Tokenizer
) -> None:
    scripted.script.pieces = ["fine"]
    page = visit(scripted.url)
    page.get_by_role("button", name="Settings").first.click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Most tokens").fill("77")
    page.get_by_label("Stop texts").fill("END\nSTOP")
    page.get_by_label("Other fields as JSON").fill('{"top_k": 5')
    ask(page, "hello")
    assert page.get_by_label("Other fields as JSON").evaluate("e => e === document.activeElement")
    assert page.locator("#prompt").input_value() == "hello"
    page.get_by_label("Other fields as JSON").fill('{"top_k": 5}')
    page.locator("#prompt").press("Enter")
    answered(page)
    params = scripted.control.added[-1].params
    assert (params.temperature, params.max_tokens, params.top_k) == (0.25, 77, 5)
    assert tuple(params.stop_strings) == ("END", "STOP")
    assert "Be brief." in tokenizer.decode(sent(scripted), False)


def test_an_answer_follows_a_schema_and_a_wrong_one_is_told(
    scripted: ScriptedServer, visit: Visit
) -> None:
    scripted.script.pieces = ['{"age": ', "7}"]
    page = visit(scripted.url, expected=("400",))
    page.get_by_role("button", name="Settings").first.click()
    page.get_by_label("Format").select_option("json_schema")
    schema = page.get_by_label("JSON schema", exact=True)
    schema.fill('{"type": "object", "properties": {"age": {"type": "integer"}}}')
    ask(page, "how old?")
    assert '{"age": 7}' in answered(page).text_content()
    assert "age" in (scripted.control.added[-1].grammar or "")
    count = len(scripted.control.added)
    schema.fill('{"type": "number of years"}')
    ask(page, "how old?")
    page.locator("article", has_text="number of years").wait_for()
    schema.fill("[1]")
    ask(page, "how old?")
    assert schema.evaluate("e => e === document.activeElement")
    assert len(scripted.control.added) == count


@pytest.mark.slow
def test_of_several_choices_the_first_is_shown(scripted: ScriptedServer, visit: Visit) -> None:
    scripted.script.pieces = ["on", "e"]
    page = visit(scripted.url)
    page.get_by_role("button", name="Settings").first.click()
    page.get_by_label("Other fields as JSON").fill('{"n": 2}')
    ask(page, "hello")
    assert answered(page).locator(".markdown").last.text_content() == "one"


REFUSED = """for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
  Object.defineProperty(globalThis, name, { get() { throw new DOMException("refused"); } });
}"""


@pytest.mark.slow
def test_a_browser_that_stores_nothing_talks_all_the_same(
    tokenizer: Tokenizer, visit: Visit
) -> None:
    with ScriptedServer(tokenizer, with_settings(api_keys=("right",))) as running:
        page = visit(running.url, expected=("401",), before=REFUSED)
        field = page.get_by_role("dialog").get_by_label("API key", exact=True)
        field.fill("right")
        field.press("Enter")
        page.locator("select.model option").first.wait_for(state="attached")
        ask(page, "hello")
        assert "fine" in answered(page).text_content()
        page.locator(".conversations .open", has_text="hello").wait_for()


def test_a_hostile_answer_is_only_text(scripted: ScriptedServer, visit: Visit) -> None:
    scripted.script.pieces = list(HOSTILE)
    page = visit(scripted.url)
    ask(page, HOSTILE)
    answer = answered(page)
    assert answer.locator("img, script, b").count() == 0
    assert answer.locator("a").all_text_contents() == ["two"]  # an image is a link, never loaded
    assert page.evaluate("window.harmed") is None
    assert "<script>window.harmed=1</script>" in answer.text_content()


@pytest.mark.slow
def test_a_long_answer_leaves_the_page_responsive(scripted: ScriptedServer, visit: Visit) -> None:
    line = "- a *point* of the list with `code` and a [link](https://example.org/a)\n"
    block = f"{line * 40}\n```python\n{'x = 1  # a line of code' * 3}\n```\n\n" + "Some text. " * 40
    pieces = [block[at : at + 100] for at in range(0, len(block), 100)] * 90
    assert sum(map(len, pieces)) > 300_000
    scripted.script.pieces = pieces
    page = visit(scripted.url)
    page.evaluate(
        """() => { window.longest = 0; let last = performance.now();
        setInterval(() => { const now = performance.now();
          window.longest = Math.max(window.longest, now - last); last = now; }, 10); }"""
    )
    ask(page, "Write a book.")
    page.locator(".answer li").first.wait_for()
    page.locator("#prompt").press_sequentially("typed meanwhile", delay=10)
    answered(page)
    assert page.locator("#prompt").input_value() == "typed meanwhile"
    assert page.locator(".answer li").count() > 3000
    assert page.evaluate("window.longest") < 1000


@pytest.mark.slow
def test_a_wrong_key_asks_for_another(tokenizer: Tokenizer, visit: Visit) -> None:
    with ScriptedServer(tokenizer, with_settings(api_keys=("right",))) as running:
        page = visit(running.url, expected=("401",))
        field = page.get_by_role("dialog").get_by_label("API key", exact=True)
        field.fill("wrong")
        with page.expect_response(lambda response: response.status == 401):
            field.press("Enter")
        page.wait_for_function("document.querySelector('dialog[open] #key')?.value === 'wrong'")
        assert page.locator(".banner").inner_text().startswith("a valid API key is needed")
        field.fill("right")
        field.press("Enter")
        page.locator(".model option").first.wait_for(state="attached")
        ask(page, "hello")
        assert "fine" in answered(page).text_content()
        stored = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
        assert json.loads(stored)[0].get("jaxllm.key /") is None  # only this tab knows the key
        assert "right" in json.loads(stored)[1].values()


@pytest.mark.slow
def test_a_server_that_goes_is_noticed_and_what_was_said_stays(
    tokenizer: Tokenizer, visit: Visit
) -> None:
    with ScriptedServer(tokenizer) as running:
        page = visit(running.url, expected=("ERR_",))
        ask(page, "hello")
        answered(page)
    ask(page, "are you there?")
    assert "The server cannot be reached." in answered(page, 2).text_content()
    assert "Trying again" in page.locator(".banner").inner_text()
    assert "fine" in answered(page, 1).text_content()


@pytest.mark.slow
def test_a_message_waits_until_the_server_answers(scripted: ScriptedServer, visit: Visit) -> None:
    scripted.script.pieces = ["fine"]
    page = visit(scripted.url, expected=("ERR_FAILED",))
    page.route("**/v1/models", lambda route: route.abort())
    page.reload()
    page.locator(".banner", has_text="Trying again").wait_for()
    ask(page, "hello")
    page.locator("#prompt").press("Enter")
    assert page.locator("#prompt").input_value() == "hello"
    page.unroute("**/v1/models")
    assert "fine" in str(answered(page).text_content())
    assert page.locator(".bubble").count() == 1
    assert page.locator("#prompt").input_value() == ""


def test_an_engine_that_fails_in_a_stream_says_so(tokenizer: Tokenizer, visit: Visit) -> None:
    with ScriptedServer(tokenizer) as running:
        running.script.pieces = ["begun ", WAIT, "never said"]
        running.script.go_on.clear()
        page = visit(running.url)
        ask(page, "hello")
        page.locator(".answer", has_text="begun").wait_for()
        running.control.fail_step = "broken"
        running.script.go_on.set()
        text = answered(page).text_content()
        assert "begun" in text
        assert "the engine failed while it ran this request" in text
        assert "never said" not in text


def chunks(*deltas: dict[str, Any], finish: str) -> str:
    """A streamed completion."""
    choices = [{"index": 0, "delta": delta} for delta in deltas]
    events = [{"choices": [choice]} for choice in choices]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def test_thought_is_folded_and_tool_calls_are_answered_by_hand(
    scripted: ScriptedServer, visit: Visit
) -> None:
    call = {"index": 0, "id": "call_1", "type": "function"}
    replies = [
        chunks(
            {"role": "assistant", "content": ""},
            {"reasoning_content": "I should ", "reasoning": "I should "},
            {"reasoning": "look."},
            {"tool_calls": [call | {"function": {"name": "look", "arguments": '{"at"'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": ': "sky"}'}}]},
            finish="tool_calls",
        ),
        chunks({"content": "It is blue."}, finish="stop"),
    ]
    bodies: list[Any] = []

    def reply(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        route.fulfill(content_type="text/event-stream", body=replies[len(bodies) - 1])

    page = visit(scripted.url)
    page.route("**/v1/chat/completions", reply)
    page.get_by_role("button", name="Settings").first.click()
    page.get_by_role("button", name="Insert an example").first.click()
    ask(page, "How is the sky?")
    thinking = page.locator(".thinking")
    thinking.wait_for()
    assert thinking.get_attribute("open") is None
    thinking.locator("summary").click()
    thinking.locator("p", has_text="I should look.").wait_for()
    page.get_by_label("Result").fill("blue")
    page.get_by_role("button", name="Send results").click()
    page.locator(".answer", has_text="It is blue.").wait_for()
    assert bodies[0]["tools"][0]["function"]["name"] == "get_weather"
    asked, thought, result = bodies[1]["messages"]
    assert asked == {"role": "user", "content": "How is the sky?"}
    assert thought["reasoning_content"] == "I should look."
    assert thought["tool_calls"] == [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "look", "arguments": '{"at": "sky"}'},
        }
    ]
    assert result == {"role": "tool", "content": "blue", "tool_call_id": "call_1"}


def test_conversations_are_listed_exported_imported_and_deleted(
    scripted: ScriptedServer, visit: Visit, tmp_path: Any
) -> None:
    scripted.script.pieces = ["fine"]
    page = visit(scripted.url)
    for text in ("first talk", "second talk"):
        ask(page, text)
        answered(page)
        page.get_by_role("button", name="New chat").click()
    titles = page.locator(".conversations .open")
    assert titles.all_inner_texts() == ["second talk", "first talk"]
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all conversations").click()
    download.value.save_as(tmp_path / "kept.json")
    page.get_by_role("button", name="Settings").first.click()
    page.get_by_role("button", name="Delete all conversations").click()
    page.get_by_role("button", name="Delete all", exact=True).click()
    page.locator(".conversations .empty").wait_for()
    page.locator("input.imported").set_input_files(tmp_path / "kept.json")
    titles.first.wait_for()
    assert sorted(titles.all_inner_texts()) == ["first talk", "second talk"]
    titles.first.click()
    assert "fine" in answered(page).text_content()


def test_a_hostile_file_of_conversations_is_text_or_refused(
    scripted: ScriptedServer, visit: Visit, tmp_path: Any
) -> None:
    said, answer = {"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}
    file = tmp_path / "kept.json"
    page = visit(scripted.url)
    for wrong in (
        {"tool_calls": None},
        {"tool_calls": [None]},
        {"tool_calls": [{"id": "a", "name": {}, "arguments": ""}]},
        {"reasoning": {}},
        {"state": {}},
        {"usage": {"prompt_tokens": 1}},
        {"files": [{"name": "a"}]},
        {"role": "system"},
        {"content": None},
    ):
        page.locator(".model option").first.wait_for(state="attached")  # else it clears the banner
        file.write_text(json.dumps([{"title": "bad", "messages": [said, answer | wrong]}]))
        page.locator("input.imported").set_input_files(file)
        page.locator(".banner", has_text="holds no conversations").wait_for()
        page.reload()
    hostile = {
        "reasoning": HOSTILE,
        "finish_reason": "constructor",
        "first": HOSTILE,
        "ended": {},
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": {"toLocaleString": 1}},
        },
    }
    kept = {"title": f"{HOSTILE} and so on", "updated": 1e300, "settings": {"toString": "x"}}
    file.write_text(json.dumps([kept | {"messages": [said, answer | hostile]}]))
    page.locator("input.imported").set_input_files(file)
    page.locator(".conversations .open", has_text="<img").click()
    assert answered(page).locator("img, script, b").count() == 0
    assert page.evaluate("window.harmed") is None


def test_a_conversation_with_a_model_that_is_gone_goes_on_with_another(
    scripted: ScriptedServer, visit: Visit, tmp_path: Any
) -> None:
    scripted.script.pieces = ["fine"]
    old = {"title": "old", "messages": [{"role": "user", "content": "hello"}]}
    (tmp_path / "old.json").write_text(json.dumps([old | {"settings": {"model": "gone"}}]))
    page = visit(scripted.url)
    page.locator(".model option").first.wait_for(state="attached")
    page.locator("input.imported").set_input_files(tmp_path / "old.json")
    page.locator(".open", has_text="old").click()
    ask(page, "and now?")
    assert answered(page).text_content().startswith("fine")
    assert page.get_by_label("Model").input_value() == "fake"
