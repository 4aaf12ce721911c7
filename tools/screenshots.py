"""Take the pictures of the page in docs/images: `python -m tools.screenshots URL`, where a server
of the demo model runs (`make browser` gets what this needs)."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SIZES = {"desktop": (1360, 960), "phone": (375, 760)}
CLIENTS, SECONDS = 12, 14
ANSWER = r"""Merge sort halves its input: \(T(n) = 2\,T(n/2) + n\), so it takes

$$T(n) = \sum_{k=0}^{\log_2 n} 2^k \cdot \frac{n}{2^k} = n \log_2 n + n$$

steps and is **stable**; quicksort needs less memory.

| | best | worst | stable |
|---|--:|--:|---|
| merge sort | \(n \log n\) | \(n \log n\) | yes |
| quicksort | \(n \log n\) | \(n^2\) | no |

```python
def quicksort(items: list[int]) -> list[int]:
    if len(items) < 2:
        return items
    pivot, *rest = items
    low = [x for x in rest if x < pivot]
    high = [x for x in rest if x >= pivot]  # equal ones too
    return [*quicksort(low), pivot, *quicksort(high)]
```"""
CONVERSATION = {
    "title": "Two ways to sort",
    "messages": [
        {"role": "user", "content": "Compare merge sort and quicksort."},
        {"role": "assistant", "content": ANSWER, "reasoning": "Stability, memory, worst case."},
    ],
}


def load(url: str, seed: int, done: threading.Event) -> None:
    """Ask the server sums, most of them after the same long prompt."""
    draw = random.Random(seed)
    while not done.is_set():
        sums = f"What is {draw.randint(1, 99)} + {draw.randint(1, 99)}?"
        shared = "Be exact and brief. " * (15 if draw.random() < 0.7 else 30 + seed)
        messages = [{"role": "system", "content": shared}, {"role": "user", "content": sums}]
        body = {"messages": messages, "max_tokens": draw.randint(60, 300), "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=60).read()
        done.wait(draw.random())


def take(browser: Any, url: str, size: str, scheme: str) -> None:
    """The pictures of one size and theme."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(url)
    page.locator(".model option").first.wait_for(state="attached")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([CONVERSATION], file)
        file.flush()
        page.locator("input.imported").set_input_files(file.name)
        page.locator(".conversations .open").first.wait_for(state="attached")
    page.locator(".conversations .open").first.evaluate("node => node.click()")
    page.fill("#prompt", "What is 27 + 58?")
    page.press("#prompt", "Enter")
    page.locator(".answer footer:not([hidden])").nth(1).wait_for()
    page.wait_for_timeout(500)
    if size == "phone":
        page.screenshot(path=IMAGES / f"page-{size}-{scheme}.png")
    page.locator("button[aria-controls=engine]").click()
    page.wait_for_timeout(1000 * SECONDS)
    name = f"page-{size}-{scheme}" if size == "desktop" else f"engine-{size}-{scheme}"
    page.screenshot(path=IMAGES / f"{name}.png")
    context.close()


def main(url: str) -> None:
    """Every picture, while the server has something to do."""
    from playwright.sync_api import sync_playwright

    IMAGES.mkdir(exist_ok=True)
    done = threading.Event()
    clients = [threading.Thread(target=load, args=(url, seed, done)) for seed in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            for size in SIZES:
                for scheme in ("light", "dark"):
                    take(browser, url, size, scheme)
            browser.close()
    finally:
        done.set()
        for client in clients:
            client.join()


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
