"""Makes of a JSON schema one that means the same and leads a grammar nowhere where it cannot end.

llguidance offers keys of a pattern although all of them are declared, and values that contain
themselves without end. Here such patterns become declared names, and such schemas `false`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jaxllm.grammar.meaning import SCALARS, Case, Meaning, both
from jaxllm.grammar.reasons import NOTHING_ENDS
from jaxllm.grammar.references import Schema, alone, changed, children
from jaxllm.grammar.texts import Regexes

MAX_NODES = 4_000  # of the graph of schemas inside schemas
ENDLESS = f"{NOTHING_ENDS}: each value holds another one that follows the same schema"

type Node = tuple[int, ...]  # schemas that one value follows together, by their ids


def completable(schema: Any, regexes: Regexes) -> Any:
    """The schema in a form whose grammar can always be completed. Raises ValueError where no
    finite value follows it, or where it has too many parts to find out."""
    inside = list(_all(schema))
    for part in inside:
        _check_repeats(part)
    if any(isinstance(part, Mapping) and part.get("patternProperties") for part in inside):
        schema = _Names(inside, regexes).written_out(schema)
    if any(isinstance(part, Mapping) and "$ref" in part for part in inside):
        schema = _Values(schema).only_finite()
    return schema


def _all(schema: Any) -> Iterator[Any]:
    """A schema and all schemas inside it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, Mapping):
            waiting += children(part)


def _check_repeats(schema: Any) -> None:
    """Raises ValueError where two keys must be there that no schema names: they may be the same,
    and then there is one."""
    least = None
    if isinstance(schema, Mapping):
        least = schema.get("minProperties")
    if isinstance(least, (int, float)) and least > len(schema.get("required") or ()) + 1:
        raise ValueError(
            f"minProperties is {least:.9g}, which cannot be held where two keys or more are free, "
            "since keys may repeat; name them in required"
        )


class _Names:
    """Writes out patterns whose keys all have names that some schema declares.

    A pattern with other keys needs no change: then a grammar has a key to offer.
    """

    def __init__(self, inside: list[Any], regexes: Regexes):
        self._regexes = regexes
        self._names = sorted(
            {
                name
                for part in inside
                if isinstance(part, Mapping)
                for keyword in ("properties", "required")
                for name in part.get(keyword) or ()
                if isinstance(name, str)
            }
        )
        self._known: dict[str, list[str] | None] = {}

    def written_out(self, schema: Any) -> Any:
        """The schema with such patterns as properties."""
        if not isinstance(schema, Mapping):
            return schema
        made = changed(schema, self.written_out, keep=True)
        patterns = made.get("patternProperties")
        if not isinstance(patterns, Mapping):
            return made
        named: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for pattern, part in patterns.items():
            keys = self._keys(pattern)
            if keys is None:
                others[pattern] = part
            for key in keys or ():
                named[key] = both([named.get(key, True), part])
        declared = made.get("properties") or {}
        both_named = {
            name: both([declared.get(name, True), named.get(name, True)])
            for name in dict.fromkeys((*declared, *named))
        }
        made |= {"patternProperties": others}
        if named:
            made |= {"properties": both_named}
        if others and self._regexes.leave_nothing(others):
            # Else the compiler offers keys with escapes, which it takes for others
            made |= {"additionalProperties": False}
        return made

    def _keys(self, pattern: str) -> list[str] | None:
        """The keys of a pattern, if all are names; None where there are others."""
        if pattern not in self._known:
            self._known[pattern] = self._regexes.only_of(pattern, self._names)
        return self._known[pattern]


class _Values:
    """Finds which schemas have finite values: the least set that holds those whose parts have."""

    def __init__(self, schema: Any):
        self._schema = alone(schema, schema)
        self._of_id: dict[int, Any] = {}
        self._needs: dict[Node, list[list[Node]]] = {}
        self._finite: set[Node] = set()

    def only_finite(self) -> Any:
        """The schema with `false` for what has no finite value. Raises ValueError where that is
        all, or where it has too many parts."""
        inside = [part for part in _all(self._schema) if isinstance(part, Mapping)]
        nodes = [self._node([part]) for part in inside]
        self._explore(list(nodes))
        self._settle()
        if self._node([self._schema]) not in self._finite:
            raise ValueError(ENDLESS)
        if all(node in self._finite for node in nodes):
            return self._schema
        definitions = self._schema.get("$defs", {})
        made = changed(self._schema, self._replaced)
        return made | {"$defs": {name: self._replaced(part) for name, part in definitions.items()}}

    def _replaced(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        if self._node([schema]) not in self._finite:
            return False
        return changed(schema, self._replaced)

    def _node(self, schemas: list[Any]) -> Node:
        self._of_id |= {id(schema): schema for schema in schemas}
        return tuple(sorted({id(schema) for schema in schemas}))

    def _explore(self, waiting: list[Node]) -> None:
        """Find what each node needs, and each of these. Raises ValueError."""
        while waiting:
            node = waiting.pop()
            if node in self._needs:
                continue
            if len(self._needs) == MAX_NODES:
                raise ValueError("it has too many parts that refer to each other; make it simpler")
            meaning = Meaning(both([self._of_id[id] for id in node]), self._schema)
            ways = [way for case in meaning.cases for way in self._ways(case)]
            self._needs[node] = [[]] if meaning.fault else ways
            waiting += itertools.chain(*self._needs[node])

    def _ways(self, case: Case) -> list[list[Node]]:
        """Ways to a value of a case: what each needs."""
        if case.values or case.allowed & SCALARS:
            return [[]]
        ways: list[list[Node]] = []
        if "array" in case.allowed:
            ways.append(self._items(case))
        if "object" in case.allowed:
            needed = [self._node(_members(case, name)) for name in case.required]
            least = max((_number(part, "minProperties") for part in case.parts), default=0)
            if least <= len(needed):
                ways.append(needed)
            else:
                free = [name for name in case.names if name not in case.required]
                more = [_members(case, name) for name in free]
                more += [_others(case)]
                ways += [[*needed, self._node(schemas)] for schemas in more]
        return ways

    def _items(self, case: Case) -> list[Node]:
        """What the items of a shortest list need."""
        least = max((_number(part, "minItems") for part in case.parts), default=0)
        lengths = [len(_prefix(part)) for part in case.parts]
        places = range(min(least, max(lengths, default=0) + 1))
        return [self._node([_item(part, place) for part in case.parts]) for place in places]

    def _settle(self) -> None:
        """Find all nodes with finite values."""
        before = -1
        while len(self._finite) != before:
            before = len(self._finite)
            self._finite |= {
                node
                for node, ways in self._needs.items()
                if any(all(need in self._finite for need in way) for way in ways)
            }


def _members(case: Case, name: str) -> list[Any]:
    """Schemas of a property. A pattern is taken for one that its name does not match, which can
    only be too lenient."""
    schemas = []
    for part in case.parts:
        declared = part.get("properties") or {}
        if name in declared:
            schemas.append(declared[name])
        elif not part.get("patternProperties"):
            schemas.append(part.get("additionalProperties", True))
    return schemas


def _others(case: Case) -> list[Any]:
    """Schemas of a property that is not declared."""
    parts = [part for part in case.parts if not part.get("patternProperties")]
    return [part.get("additionalProperties", True) for part in parts]


def _prefix(part: Schema) -> list[Any]:
    """Schemas of the first items, in the words of draft 2020-12 or before."""
    for value in (part.get("prefixItems"), part.get("items")):
        if isinstance(value, list):
            return value
    return []


def _item(part: Schema, place: int) -> Any:
    prefix = _prefix(part)
    if place < len(prefix):
        return prefix[place]
    rest = part.get("items", True)
    if isinstance(rest, list):
        return part.get("additionalItems", True)
    return rest


def _number(part: Schema, keyword: str) -> int:
    value = part.get(keyword)
    if isinstance(value, (int, float)):
        return int(value)
    return 0
