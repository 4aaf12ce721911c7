"""From the schema of a call's arguments to the pieces of a format that writes them without JSON
around them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from jaxllm.grammar.meaning import Case, Meaning, both, overlapping
from jaxllm.grammar.pieces import (
    Arguments,
    Either,
    Json,
    Literal,
    Maybe,
    Piece,
    Pieces,
    RawText,
    Repeated,
    Rule,
)
from jaxllm.grammar.reasons import NOTHING_ENDS
from jaxllm.grammar.references import Schema, alone
from jaxllm.grammar.texts import Regexes, expression, searched

OF_OBJECTS = {"type": "object"}
MAX_GROUPS = 32  # kinds of properties that are not declared
MAX_MORE = 64  # of them, where their number is bounded

# What llguidance does not hold in JSON either
_NOT_HELD = (
    *("not", "if", "then", "else", "propertyNames", "unevaluatedProperties", "dependentRequired"),
    *("dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
)
# Schemas of these keywords alone can be followed, if the schemas inside can
_HARMLESS = frozenset(("type", "title", "description", "default", "examples", "properties"))
_ONE_OF = (
    "oneOf is not supported where several of its cases may match, as far as fixed values of "
    "required properties tell; write anyOf"
)


class NothingFollows(ValueError):
    """No value follows a schema, or none that the format can write."""


def argument_pieces(
    arguments: Arguments, regexes: Regexes, compiles: Callable[[Any], str]
) -> Pieces:
    """What an object of arguments may be in a layout.

    Args:
        compiles: why a schema cannot be followed as JSON, "" where it can.

    Raises:
        ValueError: the layout cannot hold what the schema says.
    """
    return Writer(arguments, regexes, compiles).pieces()


class Writer:
    """Writes the pieces of one schema in one layout."""

    def __init__(self, arguments: Arguments, regexes: Regexes, compiles: Callable[[Any], str]):
        self._root = arguments.schema
        self._layout = arguments.layout
        self._regexes = regexes
        self._compiles = compiles

    def pieces(self) -> Pieces:
        """See `argument_pieces`."""
        cases = self._meaning(both([self._root, OF_OBJECTS])).cases
        if overlapping(cases):
            raise ValueError(_ONE_OF)
        options: list[Pieces] = []
        reason = "nothing follows the schema of the arguments"
        for case in cases:
            try:
                option = self._object(case)
            except NothingFollows as error:
                reason = str(error)
                continue
            if option not in options:
                options.append(option)
        if not options:
            raise NothingFollows(reason)
        return _one_of(options)

    def _meaning(self, schema: Any) -> Meaning:
        meaning = Meaning(schema, self._root)
        if meaning.fault:
            raise ValueError(meaning.fault)
        for case in meaning.cases:
            for part in case.parts:
                if word := next((word for word in _NOT_HELD if word in part), None):
                    raise ValueError(f"Unimplemented keys: {word}")
        return meaning

    def _object(self, case: Case) -> Pieces:
        """The arguments of one case: first those that must be there, so that commas are right.
        Where none must, each has its comma behind it."""
        required: list[Pieces] = []
        optional: list[Pieces] = []
        for name in case.names:
            self._check_key(name)
            if name in case.required:
                required.append(self._argument(name, self._property(case, name)))
                continue
            try:
                optional.append(self._argument(name, self._property(case, name)))
            except NothingFollows:
                continue
        more = [self._more(rule, schema) for rule, schema in self._groups(case)]
        comma: Pieces = (Literal(self._layout.comma),) if self._layout.comma else ()
        pieces: list[Piece] = []
        for argument in required:
            pieces += comma if pieces else ()
            pieces += argument

        def beside(argument: Pieces) -> Pieces:
            if required:
                return (*comma, *argument)
            return (*argument, *comma)

        others = [beside(argument) for argument in more if argument is not None]
        chosen = [beside(argument) for argument in optional]
        return (*pieces, *_counted(case, len(required), chosen, others))

    def _check_key(self, name: str) -> None:
        """Raises ValueError where the layout cannot write a key."""
        layout = self._layout
        if not re.fullmatch(layout.key, name) or any(text in name for text in layout.ends_key):
            raise ValueError(
                f"the property {name!r:.80} cannot be written in this model's format of tool "
                "calls; rename it"
            )

    def _property(self, case: Case, name: str) -> Any:
        """The schema of a property, with those of the patterns that match its name."""
        schemas: list[Any] = []
        for part in case.parts:
            declared = part.get("properties", {})
            named = [declared[name]] if name in declared else []
            for pattern, schema in part.get("patternProperties", {}).items():
                if self._regexes.matches(searched(pattern), name):
                    named.append(schema)
            schemas += named or [part.get("additionalProperties", True)]
        return both(schemas)

    def _groups(self, case: Case) -> Iterator[tuple[Rule, Any]]:
        """Keys that are not declared, and the schema of their values. There are such arguments
        where a schema says so, or declares none."""
        parts = [part for part in case.parts if _speaks_of_others(part)]
        if not parts and case.names:
            return
        kinds = [list(_kinds(part)) for part in parts]
        count = 1
        for patterns in kinds:
            count *= len(patterns)
        if count > MAX_GROUPS:
            raise ValueError(f"more than {MAX_GROUPS} kinds of properties that are not declared")
        for group in itertools.product(*kinds):
            schema = both([schema for _, _, schema in group])
            rule = Rule(
                patterns=tuple(pattern for present, _, _ in group for pattern in present),
                absent=tuple(pattern for _, absent, _ in group for pattern in absent),
                other_than=tuple(case.names),
                whole=self._layout.new_key,
            )
            yield rule, schema

    def _more(self, rule: Rule, schema: Any) -> Pieces | None:
        """An argument whose key is not declared; None where there is none."""
        if self._regexes.is_empty(expression([rule])):
            return None
        try:
            values = self._values(schema)
        except NothingFollows:
            return None
        return self._either(RawText(rules=(rule,)), values)

    def _argument(self, name: str, schema: Any) -> Pieces:
        """Key and value. Raises NothingFollows."""
        return self._either(Literal(name), self._values(schema))

    def _either(self, key: Literal | RawText, values: list[Pieces]) -> Pieces:
        """An argument with one of some values."""
        return _one_of([self._with_key(key, value) for value in values])

    def _with_key(self, key: Literal | RawText, value: Pieces) -> Pieces:
        """A key, a value and what stands around them."""
        text = self._layout.text
        if text is not None and isinstance(value[0], RawText):
            around = text
        else:
            around = self._layout.json
        begin = self._layout.before_key
        end = around[0]
        head: Piece
        if isinstance(key, Literal):
            head = Literal(begin + key.text + end)
        else:
            head = RawText(begin=begin, rules=key.rules, end=end)
        if isinstance(value[0], RawText):  # which has its own end
            return (head, *value)
        return (head, *value, Literal(around[1]))

    def _values(self, schema: Any) -> list[Pieces]:
        """What a value may be: raw text, JSON, or either. Raises NothingFollows."""
        if self._layout.text is None:
            return [self._json(schema)]
        meaning = self._meaning(schema)
        types = frozenset[str]().union(*(case.types for case in meaning.cases))
        rules = tuple(dict.fromkeys(_rule(case) for case in meaning.cases if _takes_text(case)))
        if meaning.free or meaning.any_text:
            types &= {"null"}  # all else is read as text
            if meaning.free:
                types = frozenset()
            if overlapping(case for case in meaning.cases if _takes_text(case)):
                raise ValueError(_ONE_OF)
        values: list[Pieces] = []
        reason = "nothing follows the schema of an argument"
        if rules:
            self._check_texts(rules)
            if not self._regexes.is_empty(expression(rules, self._layout.ends_text)):
                end = self._layout.text[1]
                values.append((RawText(rules=rules, without=self._layout.ends_text, end=end),))
        if others := types - {"string"}:
            try:
                values.append(self._json(_of_types(schema, others, meaning)))
            except NothingFollows as error:
                reason = str(error)
        if not values:
            raise NothingFollows(reason)
        return values

    def _check_texts(self, rules: tuple[Rule, ...]) -> None:
        """Raises ValueError on a text of a few that the layout cannot write."""
        for text in itertools.chain(*(rule.texts or () for rule in rules)):
            if end := next((word for word in self._layout.ends_text if word in text), None):
                raise ValueError(
                    f"the value {text!r:.80} holds {end}, which ends a value in this model's "
                    "format of tool calls"
                )

    def _json(self, schema: Any) -> Pieces:
        """A value as JSON. Raises NothingFollows."""
        if not Meaning(schema, self._root).cases:
            raise NothingFollows("nothing follows the schema of an argument")
        schema = alone(schema, self._root)
        if schema is False:
            raise NothingFollows("nothing follows the schema of an argument")
        if not _harmless(schema) and (reason := self._compiles(schema)):
            if reason.startswith((NOTHING_ENDS, "Unsatisfiable")):
                raise NothingFollows(reason)
            raise ValueError(reason)
        return (Json(schema),)


def _one_of(options: list[Pieces]) -> Pieces:
    """The pieces of one of some options."""
    if len(options) == 1:
        return options[0]
    return (Either(tuple(options)),)


def _counted(
    case: Case, required: int, optional: list[Pieces], more: list[Pieces]
) -> tuple[Piece, ...]:
    """Arguments behind those that are required, as many as may be: the optional ones, and more that
    are not declared. Raises ValueError where numbers of properties cannot be held, NothingFollows
    where none is allowed."""
    least = max((_count(part, "minProperties", 0) for part in case.parts), default=0)
    bounds = [_count(part, "maxProperties", None) for part in case.parts]
    most = min((bound for bound in bounds if bound is not None), default=None)
    if most is not None and most < max(required, least):
        raise NothingFollows("maxProperties is less than the properties that must be there")
    missing = max(0, least - required)
    if missing > len(optional) and not more:
        raise NothingFollows("minProperties is more than the properties that there may be")
    if most is not None and most < required + len(optional):
        raise ValueError(
            "maxProperties is only supported where all declared properties fit into it"
        )
    left = None
    if most is not None:
        left = most - required - len(optional)
    rest = _repeated(more, left)
    if not missing:
        return (*map(Maybe, optional), *rest)
    if missing == len(optional) and not more:
        return tuple(itertools.chain(*optional))
    if missing > 1:
        raise ValueError(
            "minProperties cannot be held where it is more than one above the properties that are "
            "required"
        )
    ways: list[Pieces] = [
        (*first, *map(Maybe, optional[number:]), *rest) for number, first in enumerate(optional, 1)
    ]
    if rest:
        fewer = None if left is None else left - 1
        ways += [(*first, *_repeated(more, fewer)) for first in more]
    return (Either(tuple(ways)),)


def _repeated(more: list[Pieces], most: int | None) -> Pieces:
    """Arguments that are not declared, of which there may be at most `most`; None for any number.
    Raises ValueError."""
    if not more or most == 0:
        return ()
    pieces = _one_of(more)
    if most is None:
        return (Repeated(pieces),)
    if most > MAX_MORE:
        raise ValueError(f"maxProperties allows more than {MAX_MORE} keys that are not declared")
    rest: Pieces = ()
    for _ in range(most):
        rest = (Maybe((*pieces, *rest)),)
    return rest


def _count(part: Schema, keyword: str, otherwise: Any) -> Any:
    """A number of properties or characters. Raises ValueError."""
    value = part.get(keyword)
    if value is None:
        return otherwise
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or value != int(value)
        or value < 0
    ):
        raise ValueError(f"{keyword} must be a whole number from 0 on")
    return int(value)


def _speaks_of_others(part: Schema) -> bool:
    """Whether a part says what properties there may be beside those that are declared."""
    return "additionalProperties" in part or bool(part.get("patternProperties"))


def _kinds(part: Schema) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Any]]:
    """Patterns that a key matches, patterns that it does not match, and the value's schema."""
    patterns = tuple(part.get("patternProperties", {}))
    for pattern in patterns:
        others = tuple(another for another in patterns if another != pattern)
        yield (pattern,), others, part["patternProperties"][pattern]
    if part.get("additionalProperties", True) is not False:
        yield (), patterns, part.get("additionalProperties", True)


def _takes_text(case: Case) -> bool:
    return "string" in case.types


def _rule(case: Case) -> Rule:
    """What texts follow a case."""
    texts = None
    if case.values is not None:
        texts = tuple(value for value in case.values if isinstance(value, str))
    if case.free:
        return Rule()
    bounds = [_count(part, "maxLength", None) for part in case.parts]
    return Rule(
        texts=texts,
        patterns=tuple(part["pattern"] for part in case.parts if "pattern" in part),
        formats=tuple(part["format"] for part in case.parts if "format" in part),
        least=max((_count(part, "minLength", 0) for part in case.parts), default=0),
        most=min((bound for bound in bounds if bound is not None), default=None),
    )


def _of_types(schema: Any, types: frozenset[str], meaning: Meaning) -> Any:
    """A schema with what is meant of its types, and nothing else."""
    if types == frozenset[str]().union(*(case.allowed for case in meaning.cases)):
        return schema
    return {"type": sorted(types), "allOf": [schema]}


def _harmless(schema: Any) -> bool:
    """Whether it is plain that values follow a schema."""
    if not isinstance(schema, dict) or not isinstance(schema.get("type"), str):
        return schema is True or schema == {}
    if schema["type"] == "array" and set(schema) <= _HARMLESS | {"items"}:
        return True
    return set(schema) <= _HARMLESS
