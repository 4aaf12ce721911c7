"""The engine view, the store's bounds, and the page below a path."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.server.page import live
from jaxllm.tokenizer import Tokenizer
from tests.server.harness import with_settings
from tests.server.page.conftest import answered, ask, script
from tests.server.page.scripted import ScriptedServer

Visit = Callable[..., Any]


@pytest.mark.slow
def test_the_engine_view_shows_frames_while_it_is_open(
    scripted: ScriptedServer, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PERIOD", 0.05)
    scripted.script.pieces = ["some "] * 20
    page = visit(scripted.url)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    ask(page, "hello")
    answered(page)
    assert not [url for url in asked if "stats" in url]
    page.get_by_role("button", name="Engine").click()
    page.locator(".pill", has_text="live").wait_for()
    engine = page.locator("#engine")
    engine.locator(".map-title", has_text="64 pages of 16 tokens").wait_for()
    assert re.search(r"TTFT.*ms.*ITL.*ms", engine.inner_text(), re.DOTALL)
    drawn = """node => node.getContext("2d").getImageData(0, 0, node.width, node.height)
      .data.some((value) => value)"""
    assert engine.locator("canvas.map").evaluate(drawn)
    page.get_by_role("button", name="Close the engine view").click()
    count = len([url for url in asked if "stats" in url])
    assert count == 1


def test_the_engine_view_says_why_it_has_no_frames(tokenizer: Tokenizer, visit: Visit) -> None:
    with ScriptedServer(tokenizer, with_settings(api_keys=("right",))) as running:
        page = visit(running.url, expected=("401",))
        page.get_by_role("dialog", name="API key").wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Engine").click()
        page.locator(".pill", has_text="needs a key").wait_for()


def test_all_works_below_a_path(tokenizer: Tokenizer, visit: Visit, chromium: Any) -> None:
    with ScriptedServer(tokenizer, root_path="/some/path") as running:
        asked: list[str] = []

        def proxy(route: Any) -> None:
            asked.append(route.request.url)
            stripped = route.request.url.replace("/some/path/", "/")
            route.fulfill(response=route.fetch(url=stripped))

        page = chromium.new_context().new_page()
        page.route(f"{running.url}/some/path/**", proxy)
        page.goto(f"{running.url}/some/path/")
        ask(page, "hello")
        assert "fine" in answered(page).text_content()
        assert f"{running.url}/some/path/v1/chat/completions" in asked
        page.context.close()


FILL = script("fill")


@pytest.mark.parametrize("kind", ["database", "memory"])
@pytest.mark.slow
def test_kept_conversations_are_bounded_in_number_and_bytes(
    scripted: ScriptedServer, visit: Visit, kind: str
) -> None:
    found = visit(scripted.url).evaluate(FILL, kind)
    assert (found["few"], found["oldest"]) == (200, 6)
    assert found["bytes"] <= found["most"]
    assert (found["newest"], found["refused"]) == ("1005", "it has more than 32 MiB")
