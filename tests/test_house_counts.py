"""The counts of docs/house.md: statements, names, imports and circles of small trees."""

from __future__ import annotations

import ast
import json
import pathlib

import pytest

from tools import house_counts
from tools.house_counts import (
    arrows,
    circles,
    counts,
    imports,
    merged,
    mermaid,
    node_of,
    private_uses,
    reachable,
    render,
    repeated_names,
    statements,
    syntax_nodes,
)

FIVE_CLASSES = "\n".join(
    f"class C{i}:\n    def feed(self): ...\n    def __init__(self): ...\n" for i in range(5)
)


def trees(**texts: str) -> dict[str, ast.Module]:
    """Syntax trees of modules; `__` in a name stands for a folder."""
    return {f"{name.replace('__', '/')}.py": ast.parse(text) for name, text in texts.items()}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ('"""Doc."""\n', 0),
        ("x = 1\n", 1),
        ("def f():\n    '''Doc.'''\n    return (1,\n  2)\n", 2),
        ("if x:\n    y = 1\nelse:\n    y = 2\n", 3),
        ("f('text')\n", 1),
    ],
)
def test_statements_are_counted_without_docstrings(text: str, count: int) -> None:
    assert statements(ast.parse(text)) == count


def test_nodes_of_syntax_leave_out_docstrings_alone() -> None:
    assert syntax_nodes(ast.parse('"""Doc."""\n')) == 1
    plain = syntax_nodes(ast.parse("def f():\n    return 1\n"))
    assert syntax_nodes(ast.parse("def f():\n    '''Doc.'''\n    return 1\n")) == plain


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("x._name", 1),
        ("x._name = x._other()", 2),
        ("self._name, cls._name", 0),
        ("self.x._name", 1),
        ("x.__name__, x.name", 0),
    ],
)
def test_private_names_of_others_are_counted(text: str, count: int) -> None:
    assert private_uses(ast.parse(text)) == count


def test_a_name_counts_once_a_class_and_protocols_of_python_do_not() -> None:
    assert repeated_names(trees(a=FIVE_CLASSES)) == {"feed": 5}
    assert repeated_names(trees(a=FIVE_CLASSES.rpartition("class")[0])) == {}


def test_imports_name_modules_of_the_packages_alone() -> None:
    found = imports(
        trees(
            jaxllm____init__="from jaxllm.llm import LLM",
            jaxllm__llm="import jax\nfrom jaxllm.engine.engine import Engine\nimport jaxllm.config",
            jaxllm__config="",
            jaxllm__engine__engine="def f():\n    from jaxllm import config",
        )
    )
    assert found["jaxllm.llm"] == {"jaxllm.engine.engine", "jaxllm.config"}
    assert found["jaxllm.engine.engine"] == {"jaxllm.config"}
    assert "jaxllm" not in found, "names of the front door load on first use"


@pytest.mark.parametrize(
    ("module", "node"),
    [
        ("jaxllm.llm", "jaxllm.llm"),
        ("jaxllm.cache.pool", "jaxllm.cache"),
        ("jaxllm.engine.engine", "jaxllm.engine.engine"),
        ("jaxllm.engine.runtime.step", "jaxllm.engine.runtime"),
        ("jaxllm.server.openai.replies", "jaxllm.server"),
        ("pallas_kernels.draw.bits", "pallas_kernels"),
    ],
)
def test_a_module_belongs_to_the_node_of_its_room(module: str, node: str) -> None:
    assert node_of(module) == node


def test_arrows_inside_a_room_vanish_with_it() -> None:
    modules = {
        "jaxllm.cache.pool": {"jaxllm.cache.prefix", "jaxllm.config"},
        "jaxllm.cache.prefix": {"jaxllm.config"},
        "jaxllm.config": set(),
    }
    rooms = merged(modules)
    assert rooms == {"jaxllm.cache": {"jaxllm.config"}, "jaxllm.config": set()}
    assert arrows(rooms) == 1 and arrows(modules) == 3


def test_a_circle_is_found_through_other_nodes() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert circles(graph) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []
    assert reachable(graph, "d") == {"a", "b", "c"}


def test_the_picture_leaves_out_arrows_that_follow_from_others() -> None:
    picture = mermaid({"a": ["b", "c"], "b": ["c"], "c": [], "alone": []})
    assert "a --> b" in picture and "b --> c" in picture and "a --> c" not in picture
    assert "alone" not in picture


def test_this_checkout_is_counted_and_every_part_of_the_page_is_written(
    repo: pathlib.Path,
) -> None:
    now = counts(repo)
    assert now["circles of rooms"] == now["circles of modules"] == []
    assert now["rooms"]["pallas_kernels/draw"]["files"] >= 5
    before = json.loads(house_counts.BEFORE.read_text())
    page = render(house_counts.PAGE.read_text(), before, now)
    assert page.count("<!-- end generated -->") == 4
    total = sum(room["statements"] for room in now["rooms"].values())
    assert f" {total} |" in page and "flowchart TD" in page
    assert render(page, before, now) == page
