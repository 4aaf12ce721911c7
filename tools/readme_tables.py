"""Write the generated parts of README.md and of pages of docs: `python -m tools.readme_tables`.
With `--check` the pages are only compared.

A part lies between `<!-- generated: NAME -->` and `<!-- end generated -->`; `TABLES` says which
function prints it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from jaxllm import models
from jaxllm.sampling.options import OPTIONS, default_of
from jaxllm.sampling.values import legal
from tools import answer_tables, sizing

REPO = Path(__file__).parents[1]
DOCS = REPO / "docs"
PAGES = (
    REPO / "README.md",
    *(
        DOCS / f"{name}.md"
        for name in ("answers", "families", "figures", "modes", "sampling", "sizing")
    ),
)
# The shapes whose figures README.md shows: a small model, a common one, in 8 bits, a mixture
MAIN_SHAPES = ("qwen3-0.6b", "qwen2.5-7b", "qwen2.5-7b in fp8", "qwen3-30b-a3b")
RESULTS = REPO / "benchmarks" / "results"
PART = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end generated -->)", re.DOTALL)


def sampling_options() -> str:
    """One row per sampling option."""
    lines = ["| option | default | legal | what it does |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | `{default_of(name)}` | {legal(row)} | {row.doc} |"
        for name, row in OPTIONS.items()
    ]
    return "\n".join(lines)


def families() -> str:
    """One row per model family, as `jaxllm models` lists them."""
    lines = ["| `model_type` | what it does here | what it is |", "|---|---|---|"]
    return "\n".join(
        lines
        + [
            f"| `{name}` | {models.state(name)} | {models.summary(name)} |"
            for name in models.families()
        ]
    )


def benchmarks() -> str:
    """The tables of the recorded results, as benchmarks/report.py prints them."""
    from benchmarks.report import tables

    return tables(RESULTS) or "None recorded yet."


def numbers() -> str:
    """The main figures of each shape, as benchmarks/report.py prints them."""
    from benchmarks.report import summary

    return summary(RESULTS) or "None recorded yet."


def main_numbers() -> str:
    """The same of a few shapes."""
    from benchmarks.report import summary

    return summary(RESULTS, MAIN_SHAPES) or "None recorded yet."


def headline() -> str:
    """How jaxllm compares with other engines, as benchmarks/report.py sums it up."""
    from benchmarks.report import headline as text

    return text(RESULTS) or "No comparison with another engine is recorded yet."


def modes() -> str:
    """Figures with each mode and without, as benchmarks/modes.py prints them."""
    from benchmarks.modes import table

    return table(RESULTS)


def accuracy() -> str:
    """What weights and pages in few bits change, as benchmarks/modes.py prints it."""
    from benchmarks.modes import accuracy as text

    return text(RESULTS)


TABLES: dict[str, Callable[[], str]] = {
    "answers": answer_tables.answers,
    "answer-formats": answer_tables.formats,
    "answer-schemas": answer_tables.schemas,
    "sampling-options": sampling_options,
    "families": families,
    "headline": headline,
    "numbers": numbers,
    "main-numbers": main_numbers,
    "benchmarks": benchmarks,
    "modes": modes,
    "accuracy": accuracy,
    "sizing": sizing.table,
}


def render(text: str) -> str:
    """`text` with every generated part replaced. Raises KeyError for a part that nothing
    generates."""
    return PART.sub(lambda part: f"{part[1]}{TABLES[part['name']]()}\n{part[3]}", text)


def main() -> int:
    """Write the pages; with --check, exit with 1 if a page is out of date."""
    rendered = {page: render(page.read_text()) for page in PAGES}
    if "--check" in sys.argv[1:]:
        return int(any(page.read_text() != text for page, text in rendered.items()))
    for page, text in rendered.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
