"""What a machine can check of accessibility: names, contrast, sizes, the keyboard, phone width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.page.conftest import DESKTOP, PHONE, answered, ask, script
from tests.server.page.scripted import ScriptedServer

Visit = Callable[..., Any]
TEXT = """## Title
Some `code`, a [link](https://example.org/) and

- [x] a list

| a | b |
|---|---|
| 1 | 2 |

> quote

```py
@cached  # a comment
def f(x: int) -> str:
    return f"{x}" + str(1.5)
```

```diff
@@ -1 +1 @@
-old
+new
```

```html
<p class="a">text</p>
```

\\(x^2\\) and $\\unknown + 1$ and

$$\\sum_{i=1}^n i = \\frac{n(n+1)}{2} = 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 + 10 + 11 + 12 + 13$$"""
NAMELESS = script("nameless")
FAINT = script("faint")
SMALL = script("small")
WIDE = script("wide")


def views(page: Any) -> Any:
    """Bring up each view in turn; yields its name."""
    ask(page, "Show everything.")
    answered(page)
    yield "chat"
    page.locator("button[aria-controls=settings]").click()
    yield "settings"
    page.locator("button[aria-controls=engine]").click()
    page.locator(".map-title:not(:empty)").wait_for()
    yield "engine"
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keyboard shortcuts").wait_for()
    yield "dialog"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_names_contrast_sizes_and_width(
    scripted: ScriptedServer, visit: Visit, scheme: str, viewport: dict[str, int]
) -> None:
    scripted.script.pieces = [TEXT]
    page = visit(scripted.url, viewport, scheme)
    assert page.evaluate(FAINT) == []
    for view in views(page):
        assert page.evaluate(NAMELESS) == [], view
        assert page.evaluate(FAINT) == [], view
        assert page.evaluate(SMALL) == [], view
        assert page.evaluate(WIDE) == [], view
    assert page.locator("html").get_attribute("lang") == "en"


def test_the_checks_find_what_is_wrong(scripted: ScriptedServer, visit: Visit) -> None:
    page = visit(scripted.url)
    page.evaluate(
        """() => {
        const button = document.createElement("button");
        const text = document.createElement("p");
        text.textContent = "pale";
        text.style.cssText = "color: #aaa; position: fixed; left: 2000px";
        document.querySelector(".composer").append(button, text);
        button.style.cssText = "min-height: 5px; height: 5px; padding: 0"; }"""
    )
    assert len(page.evaluate(NAMELESS)) == 1
    assert "pale" in page.evaluate(FAINT)[0]
    assert len(page.evaluate(SMALL)) == 1
    assert page.evaluate(WIDE) == ["P."]


def test_the_keyboard_reaches_everything_and_focus_comes_back(
    scripted: ScriptedServer, visit: Visit
) -> None:
    page = visit(scripted.url, PHONE)
    focused = (
        "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
    )
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Skip to the prompt"
    page.get_by_role("button", name="Conversations").press("Enter")
    assert page.evaluate(focused) == "New chat"
    page.keyboard.press("Escape")
    assert page.evaluate(focused) == "Conversations"
    page.locator(".sidebar").wait_for(state="hidden")
    page.get_by_role("button", name="Engine").press("Enter")
    page.get_by_role("button", name="Close the engine view").press("Enter")
    assert page.evaluate(focused) == "Engine"
    page.get_by_role("button", name="Theme").focus()
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keyboard shortcuts").wait_for()
    page.keyboard.press("Escape")
    assert page.evaluate(focused) == "Theme: system"


@pytest.mark.slow
def test_a_chosen_theme_outlives_a_reload(scripted: ScriptedServer, visit: Visit) -> None:
    page = visit(scripted.url, scheme="light")
    dark = "getComputedStyle(document.body).backgroundColor === 'rgb(19, 21, 25)'"
    page.get_by_role("button", name="Theme: system").click()
    page.get_by_role("button", name="Theme: light").click()
    assert page.evaluate(dark)
    page.reload()
    page.get_by_role("button", name="Theme: dark").wait_for()
    assert page.evaluate(dark)
