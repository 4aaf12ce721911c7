"""What references of a JSON schema mean, and parts of a schema that mean the same alone. Pure
Python, shared by what reads arguments and what compiles grammars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin

type Schema = Mapping[str, Any]

# Keywords whose value is an object of schemas, a schema, or a list of schemas
NAMED_SCHEMAS = ("properties", "patternProperties", "dependentSchemas")
ONE_SCHEMA = (
    *("additionalProperties", "propertyNames", "unevaluatedProperties", "contains", "not"),
    *("additionalItems", "unevaluatedItems", "if", "then", "else"),
)
LISTED_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
DEFINITIONS = ("$defs", "definitions")
_NAMES_A_PLACE = ("$id", "id", "$anchor", "$schema")


class NoSuchSchema(ValueError):
    """A reference leads nowhere."""


def referred(reference: str, root: Any, searched: Callable[[], None] = lambda: None) -> Any:
    """The schema that a reference inside `root` means. Raises NoSuchSchema.

    References are JSON pointers in URI fragments (RFC 6901: `~0`, `~1`, percent-encoded, numbers
    for places in lists), anchors, and identifiers of schemas inside `root`.

    Args:
        searched: called for each schema that is searched, which only anchors and identifiers need;
            it may raise.
    """
    base, _, fragment = reference.partition("#")
    document = _document(base, root, searched) if base else root
    fragment = unquote(fragment)
    if fragment and not fragment.startswith("/"):
        is_wanted = lambda schema: fragment == schema.get("$anchor")
        return _first(document, is_wanted, reference, searched)
    place = document
    for token in fragment.split("/")[1:]:
        place = _inside(place, token.replace("~1", "/").replace("~0", "~"), reference)
    return place


def _document(base: str, root: Any, searched: Callable[[], None]) -> Any:
    """The schema inside `root` whose identifier is `base`."""
    whole = None
    if isinstance(root, Mapping):
        whole = root.get("$id")
    if not isinstance(whole, str):
        whole = ""
    wanted = urljoin(whole, base)

    def is_wanted(schema: Schema) -> bool:
        name = schema.get("$id")
        return isinstance(name, str) and urljoin(whole, name).rstrip("#") == wanted

    return _first(root, is_wanted, base, searched)


def _first(
    root: Any,
    wanted: Callable[[Schema], bool],
    reference: str,
    searched: Callable[[], None],
) -> Any:
    """The first schema inside `root` of which `wanted` is true."""
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        searched()
        if isinstance(schema, Mapping):
            if wanted(schema):
                return schema
            waiting += reversed([*children(schema)])
    raise NoSuchSchema(f"the reference {reference!r:.80} leads to no schema")


def _inside(place: Any, token: str, reference: str) -> Any:
    """What stands at a key or a number."""
    if isinstance(place, Mapping) and token in place:
        return place[token]
    if isinstance(place, list) and token.isdecimal() and int(token) < len(place):
        return place[int(token)]
    raise NoSuchSchema(f"the reference {reference!r:.80} leads to no schema")


def children(schema: Schema) -> Iterator[Any]:
    """Schemas directly inside a schema, definitions included."""
    for keyword, value in schema.items():
        if keyword in (*NAMED_SCHEMAS, *DEFINITIONS) and isinstance(value, Mapping):
            yield from value.values()
        elif keyword in (*LISTED_SCHEMAS, "items") and isinstance(value, list):
            yield from value
        elif keyword in ONE_SCHEMA or keyword == "items":
            yield value


def changed(schema: Any, change: Callable[[Any], Any], keep: bool = False) -> Any:
    """A schema with `change` made to each schema directly inside it. Definitions and what names
    places go, unless they are to be kept."""
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for keyword, value in schema.items():
        names_place = keyword in _NAMES_A_PLACE and isinstance(value, str)
        if (keyword in DEFINITIONS or names_place) and not keep:
            continue
        if keyword in (*NAMED_SCHEMAS, *DEFINITIONS) and isinstance(value, Mapping):
            made[keyword] = {name: change(part) for name, part in value.items()}
        elif keyword in (*LISTED_SCHEMAS, "items") and isinstance(value, list):
            made[keyword] = [change(part) for part in value]
        elif keyword in ONE_SCHEMA or keyword == "items":
            made[keyword] = change(value)
        else:
            made[keyword] = value
    return made


def alone(schema: Any, root: Any) -> Any:
    """A schema from inside `root` that means the same without it: references of every form lead
    to definitions of its own. A reference that leads nowhere stays."""
    names: dict[int, str] = {}
    definitions: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = []

    def copied(part: Any) -> Any:
        made = changed(part, copied)
        reference = None
        if isinstance(made, dict):
            reference = made.get("$ref")
        if not isinstance(reference, str):
            return made
        try:
            target = referred(reference, root)
        except NoSuchSchema:
            return made
        if id(target) not in names:
            names[id(target)] = str(len(names))
            waiting.append((names[id(target)], target))
        return made | {"$ref": f"#/$defs/{names[id(target)]}"}

    made = copied(schema)
    while waiting:
        name, target = waiting.pop()
        definitions[name] = copied(target)
    if definitions:
        made |= {"$defs": definitions}
    return made
