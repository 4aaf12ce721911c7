"""Code in colours: what the tokens of a language are, and that colouring changes no character."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.page.conftest import script

TOKENS = script("tokens")
GROW = script("grow")
TIME = script("time")


@pytest.mark.parametrize(
    ("language", "code", "tokens"),
    [
        (
            "python",
            '@a\ndef f(x):  # c\n    return "s" + str(1.5)',
            ["meta @a", "keyword def", "function f", "comment # c", "keyword return", 'string "s"',
             "builtin str", "number 1.5"],
        ),
        ("py", '"""a\nb"""\nx', ['string """a', 'string b"""']),
        ("py", 'rf"{a}" \'b', ['string rf"{a}"', "string 'b"]),
        (
            "js",
            "const a = `x${b}` // c\nnew Map()",
            ["keyword const", "string `x", "meta ${b}", "string `", "comment // c", "keyword new",
             "builtin Map"],
        ),
        ("ts", "interface A { b: string }", ["keyword interface", "keyword string"]),
        ("json", '{"a": "b", "c": [1, true]}',
         ['attribute "a"', 'string "b"', 'attribute "c"', "number 1", "keyword true"]),
        ("bash", 'for f in *; do echo "$f" --x; done # c',
         ["keyword for", "keyword in", "keyword do", "builtin echo", 'string "', "meta $f",
          'string "', "attribute --x", "keyword done", "comment # c"]),
        ("html", '<p class="a">x</p>\n<!-- a\nb -->',
         ["tag <p", "attribute class", 'string "a"', "tag >", "tag </p>", "comment <!-- a",
          "comment b -->"]),
        ("css", ".a:hover { color: #fff; /* c */ }",
         ["type .a", "builtin :hover", "attribute color", "number #fff", "comment /* c */"]),
        ("cpp", "#include <vector>\nint main() { return 0; } /* a\nb */",
         ["meta #include", "string <vector>", "builtin int", "function main", "keyword return",
          "number 0", "comment /* a", "comment b */"]),
        ("rust", "fn f<'a>(x: &'a str) { println!(\"b\"); let c = 'd'; }",
         ["keyword fn", "meta 'a", "meta 'a", "builtin str", "function println!",
          'string "b"', "keyword let", "string 'd'"]),
        ("go", "func f() string { return `a\nb` }",
         ["keyword func", "function f", "builtin string", "keyword return", "string `a",
          "string b`"]),
        ("SQL", "SELECT a FROM b WHERE c = 'd' -- e",
         ["keyword SELECT", "keyword FROM", "keyword WHERE", "string 'd'", "comment -- e"]),
        ("yaml", "a: true # c\nb: [1, 'x']",
         ["attribute a", "keyword true", "comment # c", "attribute b", "number 1", "string 'x'"]),
        ("diff", "--- a\n+++ b\n@@ -1 @@\n-old\n+new\n same",
         ["meta --- a", "meta +++ b", "function @@ -1 @@", "deleted -old", "inserted +new"]),
        ("klingon", "if x: return", []),
        ("", "if x: return", []),
    ],
)  # fmt: skip
def test_a_language_has_these_tokens(
    page: Any, language: str, code: str, tokens: list[str]
) -> None:
    shown = page.evaluate(TOKENS, [language, code])
    assert shown["text"] == code
    assert [token for token in shown["tokens"] if not token.startswith("type ")] == [
        token for token in tokens if not token.startswith("type ")
    ]


LANGUAGES = (
    "python javascript typescript json bash html css c rust go java sql yaml toml diff markdown"
)
PIECES = ["'", '"', "`", '"""', "'''", "/*", "//", "#", "<!--", "<a ", "${", "\\", "1", "a(", "\n"]


@pytest.mark.parametrize("language", LANGUAGES.split())
def test_code_that_grows_is_coloured_as_the_whole(page: Any, language: str) -> None:
    code = " ".join(first + second for first in PIECES for second in PIECES)
    assert page.evaluate(TOKENS, [language, code])["text"] == code
    assert page.evaluate(GROW, [f"```{language}\n{code}\n```\nend", [7, 50, 211]]) == []


@pytest.mark.parametrize("language", LANGUAGES.split())
def test_no_code_takes_long(page: Any, language: str) -> None:
    for unit in ("'", '"a', "`", "/*", "a", "1", "- ", "${", "<a ", "#[", "a: ", " \\"):
        line = (unit * 2000)[:1990]
        text = f"```{language}\n" + f"{line}\n" * 25
        assert any(page.evaluate(TIME, [text, 3]) < 2000 for _ in range(3)), unit


def test_an_unusual_fence_names_its_language(page: Any) -> None:
    for fence in ("python title=a.py", "Python", "python,ignore", "{python}"):
        shown = page.evaluate(TOKENS, [fence, "def f"])
        assert shown["tokens"] == ["keyword def"], fence
