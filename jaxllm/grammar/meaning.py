"""What a JSON schema means: the cases that a value may follow, with references, `allOf`, `anyOf`
and `oneOf` resolved. What reads arguments and what compiles grammars ask the same values."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxllm.grammar.patterns import found_in
from jaxllm.grammar.references import NoSuchSchema, Schema, referred

SCALARS = frozenset(("null", "boolean", "integer", "number", "string"))
ALL_TYPES = SCALARS | {"object", "array"}
MAX_CASES = 256
MAX_STEPS = 1_000  # schemas that are looked at to find the cases of one
MAX_PARTS = 20_000  # that are put together on the way
MAX_FOLLOWED = 64  # references behind references

# Keywords that say of which type values are where nothing else does
_IMPLY: dict[str, tuple[str, ...]] = {
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("minProperties", "maxProperties", "propertyNames", "dependentRequired"),
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number"} | {
    type(None): "null",
    list: "array",
    dict: "object",
}


class TooManyCases(ValueError):
    """A schema has more cases than are looked at."""


class Choice(dict[str, Any]):
    """A part without keywords, which says that an option of a `oneOf` was taken.

    Attributes:
        options: of which this is one.
        number: of the option.
    """

    def __init__(self, options: list[Any], number: int):
        super().__init__()
        self.options = options
        self.number = number


class Case:
    """One way to follow a schema: to follow all of these parts, of which only the keywords count
    that refer to no other schema of the same value.

    Attributes:
        parts: as the schema has them; none allow everything.
        allowed: types of JSON that all parts allow. A number may be an integer.
        types: those that are meant: where no part says any, keywords imply them.
        values: the only possible values; None where there are others.
        choices: the options of `oneOf` that it took.
        nullable: a part says so, as OpenAPI 3.0 does. `types` do not count it.
    """

    def __init__(self, parts: tuple[Schema, ...]):
        self.choices = tuple(part for part in parts if isinstance(part, Choice))
        self.parts = tuple(part for part in parts if not isinstance(part, Choice))
        self.nullable = any(part.get("nullable") is True for part in self.parts)
        self.allowed = _types(self.parts)
        self.values = _values(self.parts, self.allowed)
        if self.values is not None:
            self.allowed = frozenset(_TYPE_OF[type(value)] for value in self.values)
        self.types = self.allowed
        if self.allowed == ALL_TYPES and self.values is None:
            self.types = _implied(self.parts) or ALL_TYPES

    @property
    def free(self) -> bool:
        """Whether it allows values of every type."""
        return self.types == ALL_TYPES and self.values is None

    @property
    def names(self) -> list[str]:
        """Names of properties that are declared or required, in order."""
        names: dict[str, None] = {}
        for part in self.parts:
            names |= dict.fromkeys(_mapping(part, "properties"))
        return list(names | dict.fromkeys(self.required))

    @property
    def required(self) -> list[str]:
        """Names of properties that must be there, in order."""
        names = itertools.chain(*(_list(part, "required") for part in self.parts))
        return list(dict.fromkeys(name for name in names if isinstance(name, str)))

    def member(self, name: str) -> Any:
        """The schema of a property. A name that is not declared may match any of the patterns that
        are not tried here, because they might take very long."""
        return both([_property(part, name) for part in self.parts])

    @property
    def items(self) -> Any:
        """The schema of an array's items behind those that have one of their own."""
        return both([part["items"] for part in self.parts if "items" in part])


class Meaning:
    """The cases of a schema inside `root`.

    Attributes:
        cases: at least one of them must be followed; none where no value can.
        fault: a reference that leads nowhere, or that there are too many cases. Then there is one
            case, which allows everything. "" where the meaning is known.
    """

    def __init__(self, schema: Any, root: Any):
        self.fault = ""
        self._root = root
        self._steps = 0
        self._parts = 0
        self._followed: list[int] = []  # references that are being followed
        self._members: dict[str, Any] = {}  # schemas of properties, by name
        try:
            self.cases = tuple(case for case in map(Case, self._of(schema)) if case.types)
        except (NoSuchSchema, TooManyCases) as error:
            self.fault = str(error)
            self.cases = (Case(()),)

    @functools.cached_property
    def free(self) -> bool:
        """Whether some case allows values of every type."""
        return any(case.free for case in self.cases)

    @functools.cached_property
    def any_text(self) -> bool:
        """Whether some case asks for text, and not for one of a few."""
        return any(
            "string" in case.types and case.values is None and not case.free for case in self.cases
        )

    @functools.cached_property
    def texts(self) -> frozenset[str]:
        """The texts among the possible values of cases that name them."""
        return frozenset(
            value for case in self.cases for value in case.values or () if isinstance(value, str)
        )

    @functools.cached_property
    def types(self) -> frozenset[str]:
        """All types that are allowed, null included where a part is nullable."""
        types = frozenset[str]().union(*(case.types for case in self.cases))
        if any(case.nullable for case in self.cases):
            types |= {"null"}
        return types

    @functools.cached_property
    def objects(self) -> list[Case]:
        """The cases that allow objects."""
        return [case for case in self.cases if "object" in case.types]

    def member(self, name: str) -> Any:
        """The schema of an object's property in any of the cases that say something of it, the same
        object each time."""
        if name not in self._members:
            schemas = [case.member(name) for case in self.objects]
            said = [schema for schema in schemas if schema is not True]
            self._members[name] = either(said)
        return self._members[name]

    @functools.cached_property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of declared properties, by name."""
        return _Members(self)

    @property
    def items(self) -> Any:
        """The schema of an array's items in any of the cases."""
        return either([case.items for case in self.cases if "array" in case.types])

    def _of(self, schema: Any) -> list[tuple[Schema, ...]]:
        """Parts of each case. Raises NoSuchSchema, TooManyCases."""
        self._count()
        if schema is False:
            return []
        if not isinstance(schema, Mapping):
            return [()]
        cases: list[tuple[Schema, ...]] = [(schema,)]
        reference = schema.get("$ref")
        if isinstance(reference, str):
            cases = self._joined(cases, self._behind(reference))
        for option in _list(schema, "allOf"):
            cases = self._joined(cases, self._of(option))
        for keyword in ("anyOf", "oneOf"):
            options = _list(schema, keyword)
            others: list[tuple[Schema, ...]] = []
            for number, option in enumerate(options):
                choice = (Choice(options, number),) if keyword == "oneOf" else ()
                others += [choice + case for case in self._of(option)]
            if isinstance(schema.get(keyword), list):  # an empty one allows nothing
                cases = self._joined(cases, others)
        return cases

    def _behind(self, reference: str) -> list[tuple[Schema, ...]]:
        """Parts of each case of the schema that is referred to. One that refers to itself for the
        same value adds no case."""
        target = referred(reference, self._root, self._count)
        if id(target) in self._followed:
            return []
        if len(self._followed) == MAX_FOLLOWED:
            raise TooManyCases(
                f"more than {MAX_FOLLOWED} references follow each other; make it simpler"
            )
        self._followed.append(id(target))
        cases = self._of(target)
        self._followed.pop()
        return cases

    def _joined(
        self, cases: list[tuple[Schema, ...]], others: list[tuple[Schema, ...]]
    ) -> list[tuple[Schema, ...]]:
        """What follows one of the cases and one of the others. Raises TooManyCases."""
        count = len(cases) * len(others)
        if count > MAX_CASES:
            raise TooManyCases(f"the schema has more than {MAX_CASES} cases; make it simpler")
        self._parts += sum(map(len, cases)) * len(others) + sum(map(len, others)) * len(cases)
        if self._parts > MAX_PARTS:
            raise TooManyCases("the schema has too many parts; make it simpler")
        return [_merged(case, parts) for case in cases for parts in others]

    def _count(self) -> None:
        """Counts a schema that is looked at. Raises TooManyCases after too many."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TooManyCases("the schema refers to others too often; make it simpler")


class _Members(Mapping[str, Any]):
    """Schemas of declared properties, made when they are asked for."""

    def __init__(self, meaning: Meaning):
        self._meaning = meaning
        self._names = dict.fromkeys(name for case in meaning.objects for name in case.names)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._meaning.member(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _merged(left: tuple[Schema, ...], right: tuple[Schema, ...]) -> tuple[Schema, ...]:
    """The parts of both, each once."""
    return tuple({id(part): part for part in (*left, *right)}.values())


def both(schemas: list[Any]) -> Any:
    """The schema of what follows all of these."""
    schemas = [schema for schema in schemas if schema is not True]
    return _combined("allOf", schemas)


def either(schemas: list[Any]) -> Any:
    """The schema of what follows one of these; of none, everything does."""
    return _combined("anyOf", schemas)


def _combined(keyword: str, schemas: list[Any]) -> Any:
    """Schemas under a keyword, as far as it takes one; of none, everything does."""
    if not schemas:
        return True
    if len(schemas) > 1:
        return {keyword: schemas}
    return schemas[0]


def overlapping(cases: Iterable[Case]) -> bool:
    """Whether a value may follow two options of one `oneOf`, as far as types, fixed values and
    required properties tell."""
    return any(
        not _apart(left, right)
        for left, right in itertools.combinations(cases, 2)
        if _chose_otherwise(left, right)
    )


def _chose_otherwise(left: Case, right: Case) -> bool:
    """Whether the cases chose unlike options of one `oneOf`."""
    return any(
        chosen.options is chosen_right.options and chosen.number != chosen_right.number
        for chosen in left.choices
        for chosen_right in right.choices
    )


def _apart(left: Case, right: Case) -> bool:
    """Whether no value follows both cases."""
    shared = _shared(left.allowed, right.allowed)
    if left.values is not None and right.values is not None:
        return set(map(_key, left.values)).isdisjoint(map(_key, right.values))
    if shared != {"object"}:
        return not shared
    return any(
        _differ(first.member(name), second.member(name), name in second.required)
        for first, second in ((left, right), (right, left))
        for name in first.required
    )


def _differ(left: Any, right: Any, required: bool) -> bool:
    """Whether values that have a property of these schemas tell themselves apart by it: the second
    allows none, or requires it with other fixed values."""
    left_cases = Meaning(left, {}).cases
    right_cases = Meaning(right, {}).cases
    if not right_cases:
        return True
    if not required or any(case.values is None for case in (*left_cases, *right_cases)):
        return False
    return all(_apart(case, right_case) for case in left_cases for right_case in right_cases)


def _key(value: Any) -> Any:
    """What is equal for values that are one in JSON, where 1 is 1.0 and not true. It can be
    hashed, since an enum may have tens of thousands of values."""
    if isinstance(value, bool):
        return bool, value
    if isinstance(value, list):
        return list, tuple(map(_key, value))
    if isinstance(value, dict):
        return dict, frozenset((name, _key(member)) for name, member in value.items())
    return value


def _types(parts: Iterable[Schema]) -> frozenset[str]:
    """The types that all parts allow."""
    allowed = ALL_TYPES
    for part in parts:
        names = part.get("type")
        if isinstance(names, str):
            names = [names]
        if isinstance(names, list):
            allowed = _shared(allowed, frozenset(name for name in names if isinstance(name, str)))
    return allowed


def _shared(types: frozenset[str], others: frozenset[str]) -> frozenset[str]:
    """Types that both have, where integers are numbers."""
    shared = types & others
    if ("integer" in types and "number" in others) or ("number" in types and "integer" in others):
        shared |= {"integer"}
    return shared


def _values(parts: Sequence[Schema], types: frozenset[str]) -> list[Any] | None:
    """The values that parts name, of these types; None where no part names any."""
    lists = [[part["const"]] for part in parts if "const" in part]
    lists += [part["enum"] for part in parts if isinstance(part.get("enum"), list)]
    if not lists:
        return None
    common, *others = lists
    for values in others:
        keys = set(map(_key, values))
        common = [value for value in common if _key(value) in keys]
    return [value for value in common if _is_of(value, types)]


def _is_of(value: Any, types: frozenset[str]) -> bool:
    """Whether a value is of one of the types; 1.0 is an integer."""
    name = _TYPE_OF.get(type(value), "")
    if name == "integer" or (name == "number" and value.is_integer()):
        return bool(types & {"integer", "number"})
    return name in types


def _implied(parts: Iterable[Schema]) -> frozenset[str]:
    keywords = {keyword for part in parts for keyword in part}
    return frozenset(name for name, implying in _IMPLY.items() if keywords & set(implying))


def _property(part: Schema, name: str) -> Any:
    """What a part says of a property."""
    declared = _mapping(part, "properties")
    if name in declared:
        return declared[name]
    schemas: list[Any] = []
    possible: list[Any] = []
    for pattern, schema in _mapping(part, "patternProperties").items():
        matches = found_in(pattern, name)
        if matches:
            schemas.append(schema)
        elif matches is None:
            possible.append(schema)
    if schemas:
        return both(schemas)
    return either([*possible, part.get("additionalProperties", True)])


def _mapping(schema: Schema, keyword: str) -> Mapping[str, Any]:
    value = schema.get(keyword)
    if isinstance(value, Mapping):
        return value
    return {}


def _list(schema: Schema, keyword: str) -> list[Any]:
    value = schema.get(keyword)
    if isinstance(value, list):
        return value
    return []
