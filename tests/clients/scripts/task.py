"""The task of every client: a product that the model leaves to the calculator."""

import sys

URL = sys.argv[1]
QUESTION = "What is 4839 * 273? Use the calculator."
ANSWER = "1321047"
TOOL = "calculator"
ABOUT = "Evaluate an arithmetic expression."
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
called: list[str] = []


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    called.append(expression)
    a, b = expression.split("*")
    return str(int(a) * int(b))


def finish(what: str, text: str | None) -> None:
    """The way `what` ended with `text`; the calculator was asked once."""
    assert text is not None and ANSWER in text.replace(",", ""), (what, text)
    assert len(called) == 1, (what, called)
    called.clear()
    print(what, "ok")
