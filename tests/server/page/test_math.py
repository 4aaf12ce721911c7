"""Formulas: TeX as models write it becomes MathML, and what is no formula keeps its backslashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.page.conftest import PHONE, answered, ask, script
from tests.server.page.scripted import ScriptedServer

Visit = Callable[..., Any]
FORMULA = script("formula")
RENDER = script("render")
GROW = script("grow")
TIME = script("time")
WIDE = script("wide")


@pytest.mark.parametrize(
    ("tex", "mathml"),
    [
        ("x^2", "<msup><mi>x</mi><mn>2</mn></msup>"),
        ("x_i^{2n}", "<msubsup><mi>x</mi><mi>i</mi><mrow><mn>2</mn><mi>n</mi></mrow></msubsup>"),
        ("x^10", "<msup><mi>x</mi><mn>1</mn></msup><mn>0</mn>"),
        (r"\frac12", "<mfrac><mn>1</mn><mn>2</mn></mfrac>"),
        (r"\frac{a}{b}", "<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac>"),
        (r"{a \over b}", "<mrow><mfrac><mi>a</mi><mi>b</mi></mfrac></mrow>"),
        (r"\sqrt[3]{x}", "<mroot><mrow><mi>x</mi></mrow><mn>3</mn></mroot>"),
        (r"\sqrt2", "<msqrt><mn>2</mn></msqrt>"),
        (r"\alpha\Omega\pi r", "<mi>α</mi><mi>Ω</mi><mi>π</mi><mi>r</mi>"),
        (r"a\le b\to d", "<mi>a</mi><mo>≤</mo><mi>b</mi><mo>→</mo><mi>d</mi>"),
        (r"3.14-1", "<mn>3.14</mn><mo>−</mo><mn>1</mn>"),
        (r"\sum_{i}^n", "<munderover><mo>∑</mo><mrow><mi>i</mi></mrow><mi>n</mi></munderover>"),
        (r"\int_0 x", "<msub><mo>∫</mo><mn>0</mn></msub><mi>x</mi>"),
        (r"\lim_{x}", "<munder><mo>lim</mo><mrow><mi>x</mi></mrow></munder>"),
        (r"\sin(x)", "<mi>sin</mi><mo>(</mo><mi>x</mi><mo>)</mo>"),
        (r"\sin x", "<mi>sin</mi><mspace></mspace><mi>x</mi>"),
        (r"f''(x)", "<msup><mi>f</mi><mo>′′</mo></msup><mo>(</mo><mi>x</mi><mo>)</mo>"),
        (r"\mathbb{R}\mathcal{L}", "<mrow><mi>ℝ</mi></mrow><mrow><mi>ℒ</mi></mrow>"),
        (r"\mathrm{ab}", "<mi>ab</mi>"),
        (r"\text{if } x", "<mtext>if\u00a0</mtext><mi>x</mi>"),
        (r"\text{a $x$}", "<mtext>a </mtext><mi>x</mi>"),
        (r"\hat{x}", "<mover><mrow><mi>x</mi></mrow><mo>^</mo></mover>"),
        (r"\left(x\right]", "<mrow><mo>(</mo><mi>x</mi><mo>]</mo></mrow>"),
        (r"\left.x\right|", "<mrow><mi>x</mi><mo>|</mo></mrow>"),
        (r"\{1\}", "<mo>{</mo><mn>1</mn><mo>}</mo>"),
        (r"\binom nk", "<mrow><mo>(</mo><mfrac><mi>n</mi><mi>k</mi></mfrac><mo>)</mo></mrow>"),
        (r"a \not= b", "<mi>a</mi><mo>≠</mo><mi>b</mi>"),
        (r"\operatorname{rank} A", "<mi>rank</mi><mspace></mspace><mi>A</mi>"),
        (r"\overset{a}{b}", "<mover><mrow><mi>b</mi></mrow><mrow><mi>a</mi></mrow></mover>"),
        (r"50\%", "<mn>50</mn><mi>%</mi>"),
        (
            r"\begin{pmatrix}a&b\\c&d\end{pmatrix}",
            "<mrow><mo>(</mo><mtable><mtr><mtd><mi>a</mi></mtd><mtd><mi>b</mi></mtd></mtr>"
            "<mtr><mtd><mi>c</mi></mtd><mtd><mi>d</mi></mtd></mtr></mtable><mo>)</mo></mrow>",
        ),
        (
            r"\begin{cases}1&x\\0\end{cases}",
            "<mrow><mo>{</mo><mtable><mtr><mtd><mn>1</mn></mtd><mtd><mi>x</mi></mtd></mtr>"
            "<mtr><mtd><mn>0</mn></mtd></mtr></mtable></mrow>",
        ),
        (r"\ket{a}", "<mrow><mo>|</mo><mrow><mi>a</mi></mrow><mo>⟩</mo></mrow>"),
        (r"n \log n", "<mi>n</mi><mspace></mspace><mi>log</mi><mspace></mspace><mi>n</mi>"),
        (r"\ce{H2O}", "<mrow><msub><mi>H</mi><mrow><mn>2</mn></mrow></msub><mi>O</mi></mrow>"),
        (r"\unknown{a b}{c}d", r"<mtext>\unknown{a b}{c}</mtext><mi>d</mi>"),
        (r"\unknown x", r"<mtext>\unknown</mtext><mi>x</mi>"),
    ],
)  # fmt: skip
def test_tex_becomes_mathml(page: Any, tex: str, mathml: str) -> None:
    assert page.evaluate(FORMULA, tex) == mathml


@pytest.mark.parametrize(
    "tex",
    [
        "{", "}", "x^", "_", r"\frac{1}", r"\left( x", r"\begin{foo}x\end{foo}", r"\sqrt[",
        r"\begin{matrix}x", r"\begin{matrix}x\end{cases}", "{" * 100 + "}" * 100, "x" * 10_001,
        "&x}",
    ],
)  # fmt: skip
def test_what_cannot_be_read_stays_as_it_was_written(page: Any, tex: str) -> None:
    assert page.evaluate(FORMULA, tex) == f"SOURCE {tex}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"\(x^2\)", "x2"),
        (r"a \(x\) b \[y\] c", "a x b y c"),
        ("a $x$ b $$y$$ c", "a x b y c"),
        ("$$\nx\n$$", "x"),
        ("\\[\nx\n\\]", "x"),
        ("- item\n  \\[\n  x\n  \\]", "item x"),
        ("\\begin{align}\nx &= y\n\\end{align}", "x=y"),
    ],
)
def test_every_pair_of_delimiters_is_known(page: Any, text: str, shown: str) -> None:
    html = page.evaluate(RENDER, text)
    assert "<math" in html
    texts = page.evaluate("html => [html.replaceAll(/<[^>]*>/g, ' ')]", html)[0]
    assert texts.replace(" ", "") == shown.replace(" ", "")
    assert "\\" not in texts


@pytest.mark.parametrize(
    "text",
    [
        r"\(x^2",
        r"x^2\)",
        r"\[open",
        "it costs $5 or $10",
        "US$5 and CA$6",
        "$ x $",
        "$x$5",
        "a $ b",
        "$$",
        r"\() \[]",
        r"\alpha and C:\dir",
        "$$\nx\n\nnever closed",
    ],
)
def test_what_is_no_formula_keeps_its_text(page: Any, text: str) -> None:
    html = page.evaluate(RENDER, text)
    assert "<math" not in html
    shown = page.evaluate("html => html.replaceAll(/<[^>]*>/g, '')", html)
    assert shown.replace("\n", "") == text.replace("\n", "")


def test_code_is_no_formula(page: Any) -> None:
    assert page.evaluate(RENDER, r"`\(x\)` `$x$`") == r"<p><code>\(x\)</code> <code>$x$</code></p>"


SAMPLE = r"""Roots of \(ax^2 + bx + c = 0\) and $x$ cost $5:

\[
x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}
\] as is known,
$$ y $$
and \[ z \] on a line
\[a\] b
$$
open

- in a list
  $$
  w
  $$
\begin{equation}
v
\end{equation}
\(open"""


def test_a_formula_that_grows_ends_as_the_whole(page: Any) -> None:
    assert page.evaluate(GROW, [SAMPLE, [1, 2, 3, 5, 7, 11, 13, 29, 64]]) == []


UNITS = (
    "$", "$$", "$a ", "$a$ ", r"\(", r"\)", r"\[", r"\(a\) ", r"\$", "$$\n", "\\[\n", "\\[a\nb",
    r"\begin{align}", "\\begin{align}\n", "$\\frac", "$x^",
)  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
def test_no_text_of_delimiters_takes_long(page: Any, unit: str) -> None:
    text = unit * (100_000 // len(unit))
    assert any(page.evaluate(TIME, [text, 3]) < 2000 for _ in range(3))


@pytest.mark.parametrize(
    "unit", ["{", "x^", "x_{", r"\frac{", "&", r"\\", r"\left(", "''", "[", r"\sqrt["]
)
def test_no_formula_takes_long(page: Any, unit: str) -> None:
    text = "$$" + unit * (9_000 // len(unit)) + "$$"
    assert any(page.evaluate(TIME, [text, 3]) < 1000 for _ in range(3))


HOSTILE = r"""\(\href{javascript:harmed()}{x} <img src=x onerror=harmed()>\)

$$\text{<script>window.harmed=1</script>}\class{a}{b}\style{x:y}{z}$$"""
LONG = " + ".join(f"x_{{{number}}}" for number in range(60))


def test_formulas_of_a_model_harm_nothing_and_fit_a_phone(
    scripted: ScriptedServer, visit: Visit
) -> None:
    scripted.script.pieces = [HOSTILE, f"\n\n\\({LONG}\\)\n\n$${LONG}$$\n\nInline $${LONG}$$ here"]
    page = visit(scripted.url, PHONE)
    ask(page, "Show a formula.")
    answer = answered(page)
    assert answer.locator("math").count() > 3
    assert answer.locator("a, img, script").count() == 0
    assert page.evaluate("window.harmed") is None
    assert page.evaluate(WIDE) == []
