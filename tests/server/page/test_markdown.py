"""The page's own Markdown: what it makes, that cuts of a stream do not matter, and that no text
takes long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.page.conftest import script

Visit = Callable[..., Any]
RENDER = script("render")
GROW = script("grow")
TIME = script("time")
SAMPLE = """# Title #
A *short* **paragraph** with `code`, ~~no~~ and snake_case_names,
two lines. 2 * 3 * 4 \\*stars\\*
***
***both* of them**

1. one
   - nested *item*
     more of it
   - second

   a paragraph of one
2. two
- other
- [x] done

> quoted
> ```py
> x = 1
> ```

| a | b |
|---|--:|
| 1 | `x\\|y` |
| 2 |

```js
const a = "```";
let b;
```
[link](https://example.org/a_(b)) <https://example.org/c>, https://example.org/d.
~~~
open"""


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a\nb", "<p>a<br>b</p>"),
        ("**a *b* c** _d_ ~~e~~", "<p><strong>a <em>b</em> c</strong> <em>d</em> <del>e</del></p>"),
        ("a_b_c 2 * 3 * 4 **open", "<p>a_b_c 2 * 3 * 4 **open</p>"),
        ("`a*b*` ``c`d``", "<p><code>a*b*</code> <code>c`d</code></p>"),
        ("### a ###", "<h5>a</h5>"),
        ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
        ("3. a\n\n4. b\n\nc", '<ol start="3"><li>a</li><li>b</li></ol><p>c</p>'),
        ("> a\n\nb", "<blockquote><p>a</p></blockquote><p>b</p>"),
        ("```py\n<b>\n```", "<figure><pre><code>&lt;b&gt;</code></pre></figure>"),
        ("  ```\n  a\n    b", "<figure><pre><code>a\n  b</code></pre></figure>"),
        (
            "|a|b|\n|-|:-:|\n|1|",
            "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
            "<tbody><tr><td>1</td><td></td></tr></tbody></table></div>",
        ),
        ("[a](https://x.org/b_(c))", '<p><a href="https://x.org/b_(c)">a</a></p>'),
        ("see https://x.org/a.", '<p>see <a href="https://x.org/a">https://x.org/a</a>.</p>'),
        ("[a](javascript:b) [c](data:d)", "<p>[a](javascript:b) [c](data:d)</p>"),
        ("![a](https://x.org/b.png)", '<p><a href="https://x.org/b.png">a</a></p>'),
        ("<i>a</i> &amp;", "<p>&lt;i&gt;a&lt;/i&gt; &amp;amp;</p>"),
        ("a<br>b<BR/>c", "<p>a<br>b<br>c</p>"),
        ("x<sup>2</sup> H<sub>*2*</sub>O", "<p>x<sup>2</sup> H<sub><em>2</em></sub>O</p>"),
        ("<sup><script></sup>", "<p>&lt;sup&gt;&lt;script&gt;&lt;/sup&gt;</p>"),
        ("<https://x.org/a>.", '<p><a href="https://x.org/a">https://x.org/a</a>.</p>'),
        ("a\n***\nb", "<p>a</p><hr><p>b</p>"),
        ("- [x] a", '<ul><li><input type="checkbox" disabled="">a</li></ul>'),
    ],
)
def test_markdown_becomes_these_nodes(page: Any, text: str, html: str) -> None:
    assert page.evaluate(RENDER, text) == html


def test_a_text_that_grows_ends_as_the_whole_text(page: Any) -> None:
    steps = [1, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 41, 64, 100]
    assert page.evaluate(GROW, [SAMPLE, steps]) == []


UNITS = (
    "*a ", "**a ", "***a", "_a ", "~~a ", "[", "[a](", "![", "`", "``a` ", "> ", "- ", "1. ", "|",
    "|a|b\n|-|-|\n", "a\\|b|\n", "# ", "#", "```\n", "\\", " ", "\t", "https://a ", "https://",
    "* * * x", "<a> ", "<sup>", "<sup>a</sup>", "<https://a>", "<br", "<",
    "((((", "- - - a\n", "  - a\n", "[a](b ", "=-", ":-|",
)  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_no_text_takes_long(page: Any, unit: str) -> None:
    for repeated in (unit, unit.replace("\n", " ")):
        text = repeated * (100_000 // len(repeated))
        # A busy machine may hold up one try
        assert any(page.evaluate(TIME, [text, 3]) < 2000 for _ in range(3))


def test_a_long_block_of_code_grows_in_linear_time(page: Any) -> None:
    code = "```py\n" + "x = 1  # a line\n" * 20_000
    assert page.evaluate(TIME, [code, 100]) < 4000
