"""A headless Chromium, and pages in it that must load nothing from elsewhere and log no error."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxllm.tokenizer import Tokenizer
from tests.server.page.scripted import ScriptedServer

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 375, "height": 740}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser, for one module: while it runs, this thread has a running event loop."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: make browser")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: make browser")
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def scripted(tokenizer: Tokenizer) -> Iterator[ScriptedServer]:
    """A scripted server that a module's tests share."""
    with ScriptedServer(tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def page(chromium: Any, scripted: ScriptedServer) -> Any:
    """A page to run the renderer in."""
    page = chromium.new_context().new_page()
    page.goto(scripted.url)
    return page


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages, each in a profile of its own. Whatever a test does, no page may load from
    another host or log an error but those `expected`."""
    opened: list[Any] = []
    problems: list[str] = []

    def visit(
        url: str,
        viewport: dict[str, int] = DESKTOP,
        scheme: str = "light",
        expected: tuple[str, ...] = (),
        before: str = "",
    ) -> Any:
        context = chromium.new_context(viewport=viewport, color_scheme=scheme)
        context.add_init_script(before)
        page = context.new_page()
        page.set_default_timeout(60_000)
        opened.append(context)

        def log(text: str) -> None:
            if not any(part in text for part in expected):
                problems.append(text)

        page.on("console", lambda m: log(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: log(str(error)))
        page.on("request", lambda r: None if r.url.startswith((url, "blob:")) else log(r.url))
        page.goto(url)
        page.locator(".composer").wait_for()
        return page

    yield visit
    for context in opened:
        context.close()
    assert problems == []


def script(name: str) -> str:
    """A function of `scripts/`, to be evaluated in a page."""
    return (pathlib.Path(__file__).parent / "scripts" / f"{name}.js").read_text()


def ask(page: Any, text: str) -> None:
    """Type a message and send it with the keyboard."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Any, number: int = 1) -> Any:
    """Wait until so many answers are complete; the last one."""
    finished = page.locator(".answer:has(> footer:not([hidden]))")
    finished.nth(number - 1).wait_for()
    return finished.nth(number - 1)
