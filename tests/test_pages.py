"""The pages of docs: no longer than a reader has patience for, links that lead somewhere, names
that exist, and snippets that a test runs."""

from __future__ import annotations

import importlib
import pathlib
import re

import pytest

REPO = pathlib.Path(__file__).parents[1]
DOCS = REPO / "docs"
PAGES = [REPO / "README.md", REPO / "tests" / "README.md", *sorted(DOCS.glob("*.md"))]
MAX_BYTES = {"README.md": 9_000, "docs/ARCHITECTURE.md": 12_000, "CHANGELOG.md": 6_000}
# The test that runs or reads a page's snippets
SNIPPETS = {
    "api.md": "tests/test_readme.py",
    "benchmarks.md": "tests/benchmarks/test_commands.py",
    "clients.md": "tests/clients/agents.py",
    "deploy.md": "tests/test_operator_pages.py",
    "hosts.md": "tests/server/test_docs.py",
    "llm.md": "tests/test_llm_docs.py",
    "modes.md": "tests/benchmarks/test_commands.py",
    "sampling.md": "tests/test_llm_docs.py",
    "server.md": "tests/server/test_docs.py",
}
NAMES_OF_VLLM = 10


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("name", MAX_BYTES)
def test_a_page_is_no_longer_than_it_may_be(name: str) -> None:
    assert len((REPO / name).read_bytes()) <= MAX_BYTES[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_link_leads_to_a_file_and_a_heading_of_it(page: pathlib.Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", page.read_text())
    for target, anchor in links:
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), (target, anchor)


@pytest.mark.parametrize(
    "page", sorted(DOCS.glob("*.md")), ids=lambda page: str(page.relative_to(DOCS))
)
def test_a_test_runs_or_reads_the_snippets_of_a_page(page: pathlib.Path) -> None:
    languages = set(re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE))
    if languages - {"mermaid"}:
        assert page.name in (REPO / SNIPPETS[page.name]).read_text()


def test_ten_names_of_vllm_stand_beside_ours() -> None:
    table = (DOCS / "ARCHITECTURE.md").read_text().split("## If you know vLLM")[1]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
    assert len(rows) == NAMES_OF_VLLM
    for _, ours in rows:
        symbols = re.findall(r"\[`(\w+)`\]\(\.\./([\w/]+)\.py\)", ours)
        assert symbols
        for symbol, path in symbols:
            assert hasattr(importlib.import_module(path.replace("/", ".")), symbol), symbol


def test_a_test_of_each_kind_starts_from_what_is_there() -> None:
    page = REPO / "tests" / "README.md"
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", page.read_text(), re.MULTILINE)[1:]
    assert len(rows) == 5
    for _, start in rows:
        links = re.findall(r"\[`(\w+)`\]\(([\w/.]+)\)", start)
        assert links
        for name, target in links:
            source = (page.parent / target).read_text()
            assert re.search(rf"^(class|def) {name}\b|^{name}\b", source, re.MULTILINE), name
