"""Counts that say how readable the sources are: `python -m tools.house_counts`.

`--write` puts them, beside those of docs/house_before.json, into the generated parts of
docs/house.md. `--json ROOT` prints the counts of another checkout, as docs/house_before.json holds
them. Files on a path are counted by `python -m tools.walks`, which runs the engine.

A room is a folder of jaxllm/ or pallas_kernels/. In the picture of imports, a module beside the
rooms of its folder, such as jaxllm/llm.py, is a node of its own.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tools import laws
from tools.readme_tables import PART
from tools.walks import tables

REPO = Path(__file__).parents[1]
PACKAGES = ("jaxllm", "pallas_kernels")
PAGE, BEFORE = REPO / "docs" / "house.md", REPO / "docs" / "house_before.json"
MAX_CLASSES = 4
ALL = "all"
COLUMNS = ("files", "statements", "packed", "conditionals")
type Graph = dict[str, set[str]]
Function = (ast.FunctionDef, ast.AsyncFunctionDef)
Documented = (ast.Module, ast.ClassDef, *Function)


def sources(root: Path) -> dict[str, ast.Module]:
    """The shipped modules: path relative to `root` → syntax tree."""
    return {
        path.relative_to(root).as_posix(): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((root / package).rglob("*.py"))
    }


def statements(tree: ast.Module) -> int:
    """Statements of a module without docstrings."""
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", 0), str))
        for node in ast.walk(tree)
    )


def syntax_nodes(tree: ast.Module) -> int:
    """Nodes of a module's syntax tree without docstrings, each of which is two nodes: the measure
    that neither the length of lines nor the packing of statements changes."""
    nodes = list(ast.walk(tree))
    documented = [node for node in nodes if isinstance(node, Documented)]
    docstrings = [node for node in documented if ast.get_docstring(node, clean=False) is not None]
    return len(nodes) - 2 * len(docstrings)


def private_uses(tree: ast.Module) -> int:
    """Uses of a private name (`x._name`) of anything but `self` or `cls`."""
    private = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
    ]
    return sum(
        not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in private
    )


def private_uses_by_tests(root: Path) -> int:
    """Uses of private names of others in the tests of a checkout."""
    tests = sorted((root / "tests").rglob("*.py"))
    return sum(private_uses(ast.parse(path.read_text())) for path in tests)


def counts(root: Path) -> dict[str, Any]:
    """All counts of a checkout, as JSON."""
    trees = sources(root)
    by_room: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path, tree in trees.items():
        room = by_room[path.rpartition("/")[0]]
        room[0] += 1
        room[1] += statements(tree)
    style = styles(root)
    modules = imports(trees)
    rooms = merged(modules)
    engine = {name: others for name, others in rooms.items() if name.startswith("jaxllm.engine.")}
    return {
        "rooms": {
            room: {"files": n[0], "statements": n[1], **style[room]}
            for room, n in sorted(by_room.items())
        },
        **style[ALL],
        "nodes of syntax": sum(map(syntax_nodes, trees.values())),
        "private names in tests": private_uses_by_tests(root),
        "longest files": longest(
            {path: (root / path).read_text().count("\n") for path in trees}, 5
        ),
        "longest functions": longest(functions(trees), 5),
        "names in many classes": repeated_names(trees),
        "nodes": len(rooms),
        "arrows": arrows(rooms),
        "circles of rooms": circles(rooms),
        "circles of modules": circles(modules),
        "nodes of the engine": len(engine),
        "arrows of the engine": arrows(engine),
        "graph": {name: sorted(others) for name, others in sorted(rooms.items())},
    }


def styles(root: Path) -> dict[str, dict[str, float]]:
    """Packed assignments and conditional expressions in 1,000 lines (`tools.laws`), of each room
    and of all."""
    files = {path: laws.count(text) for path, text in laws.sources(root)}
    rooms = laws.by_room(files)
    rooms[ALL] = laws.Counts()
    for counts in files.values():
        rooms[ALL].add(counts)
    return {
        room: {
            "packed": round(counts.per_thousand(counts.packed), 1),
            "conditionals": round(counts.per_thousand(counts.conditionals), 1),
        }
        for room, counts in rooms.items()
    }


def longest(lengths: dict[str, int], count: int) -> dict[str, int]:
    """The `count` largest lengths, in lines."""
    return dict(sorted(lengths.items(), key=lambda item: -item[1])[:count])


def functions(trees: dict[str, ast.Module]) -> dict[str, int]:
    """Lines of every function outside the kernels, which have a limit of their own."""
    return {
        f"{path}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, tree in trees.items()
        if path.startswith("jaxllm/")
        for node in ast.walk(tree)
        if isinstance(node, Function)
    }


def repeated_names(trees: dict[str, ast.Module]) -> dict[str, int]:
    """Methods that more than `MAX_CLASSES` classes define. Python's own protocols do not count."""
    found = Counter(
        node.name
        for tree in trees.values()
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, Function) and not node.name.startswith("__")
    )
    return {name: n for name, n in found.most_common() if n > MAX_CLASSES}


def imports(trees: dict[str, ast.Module]) -> Graph:
    """Which modules of the packages each module imports. A package's front door counts for the
    modules beside and below it alone, so that names which load on first use are no arrows."""
    named = {path.removesuffix(".py").replace("/", "."): tree for path, tree in trees.items()}
    named = {name.removesuffix(".__init__"): tree for name, tree in named.items()}
    out: Graph = {}
    for name, tree in named.items():
        found: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {one if one in named else node.module for one in full}
        out[name] = {other for other in found if other in named and other != name}
    return {name: others for name, others in out.items() if name not in PACKAGES}


def node_of(module: str) -> str:
    """The node of the picture that a module belongs to: its room; the rooms of the engine apart,
    those of the server and the kernels together."""
    parts = module.split(".")
    depth = {"pallas_kernels": 1}.get(parts[0], 3 if parts[1:2] == ["engine"] else 2)
    return ".".join(parts[:depth])


def merged(modules: Graph) -> Graph:
    """The graph of modules with those of a node taken together."""
    out: Graph = defaultdict(set)
    for name, others in modules.items():
        out[node_of(name)] |= {node_of(other) for other in others} - {node_of(name), *PACKAGES[:1]}
    return dict(out)


def arrows(graph: Graph) -> int:
    """The number of arrows of a graph."""
    return sum(len(others & graph.keys()) for others in graph.values())


def reachable(graph: Graph, start: str) -> set[str]:
    """All nodes that arrows lead to from `start`."""
    found: set[str] = set()
    todo = [start]
    while todo:
        for other in graph.get(todo.pop(), set()) - found:
            found.add(other)
            todo.append(other)
    return found


def circles(graph: Graph) -> list[list[str]]:
    """Sets of nodes that import each other, directly or not."""
    below = {name: reachable(graph, name) for name in graph}
    found = {
        tuple(sorted(other for other in below[name] if name in below.get(other, set())))
        for name in graph
        if name in below[name]
    }
    return sorted(list(circle) for circle in found)


def mermaid(graph: dict[str, list[str]]) -> str:
    """The graph as a Mermaid diagram, without arrows that follow from others."""
    sets = {name: set(others) & graph.keys() for name, others in graph.items()}
    lines = ["```mermaid", "flowchart TD"]
    used = {name for name, others in sets.items() if others}.union(*sets.values())
    lines += [f'  {name.replace(".", "_")}["{name}"]' for name in graph if name in used]
    for name, others in sorted(sets.items()):
        implied = {far for other in others for far in reachable(sets, other)}
        direct = others if name in reachable(sets, name) else others - implied
        lines += [f"  {name.replace('.', '_')} --> {o.replace('.', '_')}" for o in sorted(direct)]
    return "\n".join([*lines, "```"])


def rooms_table(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Counts of each room, before and now."""
    heads = [f"{column}{when}" for column in COLUMNS for when in (" before", "")]
    lines = [f"| room | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for room in sorted(before["rooms"].keys() | now["rooms"].keys()):
        both = [counted["rooms"].get(room, {}) for counted in (before, now)]
        cells = [counts.get(column, "–") for column in COLUMNS for counts in both]
        lines.append(f"| `{room}/` | " + " | ".join(map(str, cells)) + " |")
    totals = [total(counted, column) for column in COLUMNS for counted in (before, now)]
    return "\n".join([*lines, "| **all** | " + " | ".join(map(str, totals)) + " |"])


def total(counted: dict[str, Any], column: str) -> float:
    """The count of all rooms: of files and statements the sum, else what all lines have."""
    if column in counted:
        return float(counted[column])
    return sum(room[column] for room in counted["rooms"].values())


def measures_table(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The other counts, before and now."""

    def listed(found: dict[str, int]) -> str:
        return ", ".join(f"`{name}` {n}" for name, n in found.items()) or "none"

    def circled(found: list[list[str]]) -> str:
        return "; ".join(" ↔ ".join(f"`{name}`" for name in circle) for circle in found) or "none"

    rows = [
        ("nodes of the syntax tree without docstrings", lambda w: w["nodes of syntax"]),
        ("private names of others that tests use", lambda w: w["private names in tests"]),
        ("longest files, lines", lambda w: listed(w["longest files"])),
        ("longest functions outside kernels, lines", lambda w: listed(w["longest functions"])),
        (
            f"methods in more than {MAX_CLASSES} classes",
            lambda w: listed(w["names in many classes"]),
        ),
        ("nodes and arrows of the picture below", lambda w: f"{w['nodes']}, {w['arrows']}"),
        ("circles of rooms", lambda w: circled(w["circles of rooms"])),
        ("circles of modules", lambda w: circled(w["circles of modules"])),
        (
            "of these in the engine",
            lambda w: f"{w['nodes of the engine']}, {w['arrows of the engine']}",
        ),
    ]
    lines = ["| measure | before | now |", "|---|---|---|"]
    return "\n".join(lines + [f"| {name} | {of(before)} | {of(now)} |" for name, of in rows])


def render(text: str, before: dict[str, Any], now: dict[str, Any]) -> str:
    """docs/house.md with its generated parts written anew."""
    parts = {
        "rooms": rooms_table(before, now),
        "measures": measures_table(before, now),
        "paths": tables.table(**tables.stored()),
        "picture": mermaid(now["graph"]),
    }
    return PART.sub(lambda part: f"{part[1]}{parts[part['name']]}\n{part[3]}", text)


def main() -> int:
    """Print the tables, write them into the page, or print another checkout's counts as JSON."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--json"]:
        print(json.dumps(counts(Path(*arguments[1:2] or [REPO])), indent=1))
        return 0
    before, now = json.loads(BEFORE.read_text()), counts(REPO)
    if arguments == ["--write"]:
        PAGE.write_text(render(PAGE.read_text(), before, now))
    else:
        print(rooms_table(before, now), measures_table(before, now), sep="\n\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
