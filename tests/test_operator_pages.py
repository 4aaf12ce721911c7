"""The pages for operators: the messages that they quote are those of the code, their snippets are
whole, and the table of sizes has a row for each model."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tools import sizing
from tools.readme_tables import PART

REPO = Path(__file__).parents[1]
DOCS = REPO / "docs"
DIFFERS = "…"  # in a quoted message: what is not fixed
PAGES = ("troubleshooting", "security", "deploy", "sizing")
OF_METRICS = re.compile(r"(?:vllm|jaxllm):")


def text_of(page: str) -> str:
    return (DOCS / page).read_text()


def snippets(page: str, language: str) -> list[str]:
    """The fenced blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.DOTALL | re.MULTILINE)


@functools.cache
def texts() -> str:
    """Every text that the package's code holds, one a line, with `…` for what is filled in."""
    lines = []
    for path in sorted((REPO / "jaxllm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines.append(node.value.replace("\n", " "))
            elif isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else DIFFERS
                    for part in node.values
                ]
                lines.append("".join(map(str, parts)).replace("\n", " "))
    return "\n".join(lines)


def quoted() -> Iterator[str]:
    """What the first cells of the page's tables quote, metrics apart."""
    for line in text_of("troubleshooting.md").splitlines():
        if line.startswith("| "):
            for span in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                if not OF_METRICS.match(span) and not span.startswith("/"):
                    yield span


@pytest.mark.parametrize("message", sorted(set(quoted())))
def test_a_quoted_message_is_one_of_the_code(message: str) -> None:
    """Its fixed parts follow each other in one text."""
    parts = [re.escape(part) for part in message.split(DIFFERS)]
    assert re.search(".*".join(parts), texts())


def test_the_page_quotes_messages() -> None:
    assert len(set(quoted())) > 40


@pytest.mark.parametrize("page", PAGES)
def test_the_first_page_leads_to_each_page(page: str) -> None:
    assert f"(docs/{page}.md)" in (REPO / "README.md").read_text()


def test_a_proxy_passes_streams_on_at_once(tmp_path: Path) -> None:
    """Snippets of deploy.md; nginx reads its own where it is installed."""
    (nginx,) = snippets("deploy.md", "nginx")
    (caddy,) = snippets("deploy.md", "caddy")
    for text in (nginx, caddy):
        assert text.count("{") == text.count("}")
        assert "127.0.0.1:8000" in text
    directives = dict(re.findall(r"^ +(\w+) (.*);$", nginx, re.MULTILINE))
    assert directives["proxy_buffering"] == directives["gzip"] == "off"
    assert directives["proxy_read_timeout"] == "1h"
    assert re.search(r"^ +flush_interval -1$", caddy, re.MULTILINE)
    if (program := shutil.which("nginx")) is None:
        return
    site = tmp_path / "nginx.conf"
    site.write_text(
        f"pid {tmp_path}/pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{ access_log off; server {{ listen 8080;\n{nginx}}} }}\n"
    )
    subprocess.run([program, "-t", "-p", str(tmp_path), "-c", str(site)], check=True)


def test_the_rotation_of_logs_is_for_the_service_of_the_composition() -> None:
    (rotation,) = snippets("deploy.md", "yaml")
    composition = yaml.safe_load((REPO / "server" / "container" / "compose.yaml").read_text())
    services = yaml.safe_load(rotation)["services"]
    assert services.keys() <= composition["services"].keys()
    assert services["jaxllm"]["logging"]["driver"] == "json-file"


def test_the_table_of_sizes_has_a_row_for_each_model_and_a_column_for_each_card() -> None:
    table = next(
        part[0] for part in PART.finditer(text_of("sizing.md")) if part["name"] == "sizing"
    )
    head, _, *rows = [line for line in table.splitlines() if line.startswith("|")]
    columns = head.strip("| ").split(" | ")
    assert columns[3:] == list(sizing.CARDS)
    assert len(rows) == len(sizing.MODELS)
    for row in rows:
        sizes = row.strip("| ").split(" | ")[3:]
        tokens = [0 if size == "no" else int(re.sub(r"\D", "", size)) for size in sizes]
        assert len(tokens) == len(sizing.CARDS)
        assert tokens == sorted(tokens), "a larger card holds no less"


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [(0, "no"), (999, "< 1k"), (22_700, "22k"), (175_000, "170k"), (1_130_000, "1,100k")],
)
def test_a_number_of_tokens_is_rounded_down(tokens: int, shown: str) -> None:
    assert sizing.cell(tokens) == shown
