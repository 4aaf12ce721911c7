"""The laws of style that can be counted: `python -m tools.laws`.

Three laws hold in jaxllm/ and pallas_kernels/. Each protects the reader from a way of saving lines:

- **One statement binds one thing.** `a, b = x, y` binds two; a swap, or unpacking one value that
  has several parts, does not. A room, and a file of more than 100 lines, may have 3 of them in
  1,000 lines, for pairs that belong together.
- **A conditional expression is on one line and holds no other.** There are at most 9 in 1,000 lines
  of a room.
- **A name is a noun of the thing.** `EMPTY` lists the words that name nothing. They are no names of
  locals, parameters or attributes, except for attributes in `FIELDS`, which a wire format names.

Without options it prints the counts of each room. `--check` prints what breaks a law and ends with
1 if something does. `--of PATH` counts another checkout; `--room ROOM` lists a room's places. A
room in `UNMENDED` is counted but not checked: its lines are older than the laws.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).parents[1]
PACKAGES = ("jaxllm", "pallas_kernels")
PACKED_PER_THOUSAND = 3
CONDITIONALS_PER_THOUSAND = 9
LONG_FILE = 100
EMPTY = frozenset(
    "at each found given kind one other own so some such that this what which".split()
)
FIELDS = frozenset({"kind"})
UNMENDED = frozenset(
    {
        "jaxllm/cache",
        "jaxllm/engine",
        "jaxllm/engine/constraints",
        "jaxllm/engine/intake",
        "jaxllm/engine/output",
        "jaxllm/engine/runtime",
        "jaxllm/engine/runtime/compilation",
        "jaxllm/engine/runtime/pipeline",
        "jaxllm/engine/runtime/programs",
        "jaxllm/engine/scheduling",
        "jaxllm/engine/startup",
        "jaxllm/engine/startup/pipeline",
        "jaxllm/engine/transfer",
    }
)


@dataclass(frozen=True)
class Fault:
    """A place that a law is about. `line` counts from 1."""

    line: int
    text: str


@dataclass
class Counts:
    """What a file, or all files of a room, has of each law's matter."""

    lines: int = 0
    packed: list[Fault] = field(default_factory=list)
    conditionals: list[Fault] = field(default_factory=list)
    folded: list[Fault] = field(default_factory=list)
    names: list[Fault] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Add the counts of `other`, whose lines then no longer say which file they are in."""
        self.lines += other.lines
        self.packed += other.packed
        self.conditionals += other.conditionals
        self.folded += other.folded
        self.names += other.names

    def per_thousand(self, faults: list[Fault]) -> float:
        """`faults` in 1,000 lines; 0 where there are no lines."""
        return 1000 * len(faults) / max(1, self.lines)


def count(text: str) -> Counts:
    """The counts of one module. Lines are those that are not blank."""
    counts = Counts(lines=sum(1 for line in text.splitlines() if line.strip()))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and is_packed(node):
            counts.packed.append(Fault(node.lineno, ast.unparse(node)))
        if isinstance(node, ast.IfExp):
            counts.conditionals.append(Fault(node.lineno, ast.unparse(node)))
            if is_folded(node):
                counts.folded.append(Fault(node.lineno, ast.unparse(node)))
        counts.names += [Fault(line, name) for line, name in bound(node) if name in EMPTY]
    return counts


def is_packed(node: ast.Assign) -> bool:
    """Whether it binds several names to several values, and is no swap."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    targets = sorted(ast.unparse(element) for element in target.elts)
    values = sorted(ast.unparse(element) for element in node.value.elts)
    return targets != values


def is_folded(node: ast.IfExp) -> bool:
    """Whether a conditional expression takes several lines or holds another one."""
    parts = (node.test, node.body, node.orelse)
    nested = any(isinstance(inner, ast.IfExp) for part in parts for inner in ast.walk(part))
    return nested or node.lineno != node.end_lineno


def bound(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of what a node binds: a local, a parameter, or an attribute of a class or of
    `self`."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            yield node.lineno, name
        case ast.arg(arg=name):
            yield node.lineno, name
        case ast.Attribute(attr=name, ctx=ast.Store()) if name not in FIELDS:
            yield node.lineno, name.lstrip("_")


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """Path below `root`, and text, of each module of the packages."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path.read_text()


def by_room(files: dict[str, Counts]) -> dict[str, Counts]:
    """The counts of each folder."""
    rooms: dict[str, Counts] = {}
    for path, counts in files.items():
        rooms.setdefault(path.rpartition("/")[0], Counts()).add(counts)
    return rooms


def breaches(files: dict[str, Counts]) -> Iterator[str]:
    """A line for each breach of a law, which says where it is, and the limit."""
    checked = {
        path: counts for path, counts in files.items() if path.rpartition("/")[0] not in UNMENDED
    }
    for path, counts in checked.items():
        for fault in counts.folded:
            yield f"{path}:{fault.line}: a conditional expression is folded: {fault.text[:60]}"
        for fault in counts.names:
            yield f"{path}:{fault.line}: {fault.text!r} names nothing"
        if counts.lines > LONG_FILE:
            yield from too_dense(path, counts, counts.packed, "packed", PACKED_PER_THOUSAND)
    for room, counts in by_room(checked).items():
        yield from too_dense(room, counts, counts.packed, "packed", PACKED_PER_THOUSAND)
        conditionals = "conditional expressions"
        limit = CONDITIONALS_PER_THOUSAND
        yield from too_dense(room, counts, counts.conditionals, conditionals, limit)


def too_dense(
    name: str, counts: Counts, faults: list[Fault], what_they_are: str, limit: int
) -> Iterator[str]:
    """A line if `faults` are more than `limit` in 1,000 lines. One alone is never too dense: a
    small room could have none else."""
    density = counts.per_thousand(faults)
    if density > limit and len(faults) > 1:
        yield f"{name}: {density:.1f} {what_they_are} in 1,000 lines; at most {limit}"


def table(files: dict[str, Counts]) -> str:
    """Each room's counts in 1,000 lines, and at the end those of all."""
    total = Counts()
    rows = [f"{'room':46} {'lines':>6} {'packed':>7} {'cond.':>6} {'folded':>7} {'names':>6}"]
    for room, counts in sorted(by_room(files).items()):
        total.add(counts)
        rows.append(row(room, counts))
    return "\n".join([*rows, row("all", total)])


def row(room: str, counts: Counts) -> str:
    """One line of the table."""
    packed = counts.per_thousand(counts.packed)
    conditionals = counts.per_thousand(counts.conditionals)
    folded, names = len(counts.folded), len(counts.names)
    return f"{room:46} {counts.lines:6} {packed:7.1f} {conditionals:6.1f} {folded:7} {names:6}"


def main() -> None:
    """Print the table, or check the laws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="end with 1 if a law is broken")
    parser.add_argument("--of", type=Path, default=REPO, help="the checkout to count")
    parser.add_argument("--room", help="list every place of this room")
    options = parser.parse_args()
    files = {path: count(text) for path, text in sources(options.of)}
    if options.check:
        broken = list(breaches(files))
        print("\n".join(broken))
        sys.exit(bool(broken))
    if options.room:
        for path, counts in files.items():
            if path.rpartition("/")[0] == options.room:
                places = [*counts.packed, *counts.conditionals, *counts.names]
                for fault in sorted(places, key=lambda fault: fault.line):
                    print(f"{path}:{fault.line}: {fault.text[:90]}")
        return
    print(table(files))


if __name__ == "__main__":
    main()
