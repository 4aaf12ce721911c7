"""/docs in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.page.conftest import DESKTOP, PHONE
from tests.server.page.scripted import ScriptedServer


@pytest.fixture
def page(chromium: Any, scripted: ScriptedServer) -> Iterator[Any]:
    """A page that must load nothing from elsewhere and log no error."""
    problems: list[str] = []
    context = chromium.new_context(viewport=DESKTOP)
    page = context.new_page()
    page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda r: None if r.url.startswith(scripted.url) else problems.append(r.url),
    )
    yield page
    context.close()
    assert problems == []


def test_every_route_and_schema_is_shown(page: Any, scripted: ScriptedServer) -> None:
    document = scripted.get("/openapi.json").json()
    page.goto(f"{scripted.url}/docs")
    page.locator("#CompletionRequest").wait_for(state="attached")
    operations = sum(map(len, document["paths"].values()))
    schemas = document["components"]["schemas"]
    assert page.locator("details").count() == operations + len(schemas)
    page.locator("summary", has_text="/v1/messages").first.click()
    page.get_by_role("link", name="MessagesRequest").first.click()
    assert page.locator("#MessagesRequest td", has_text="max_tokens *").is_visible()
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
