"""The fields that bodies may hold, as each dialect declares its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NO_SIZES: Mapping[str, int | None] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyFields:
    """Fields of request bodies, by which large bodies are read and refused.

    A dialect declares its own beside its parser; who composes the routes joins all of them and
    hands them to `bodies.Bodies`. Fields that no large body needs may be left out.

    Attributes:
        names: known fields; those of `sizes` are known without being named here.
        sizes: fields whose legal values may be large, with the most bytes that they have without
            whitespace; None is no limit.
        prompts: fields that hold prompts: texts, or token ids to generate from.
        token_ids: fields that hold one list of token ids, from which nothing is generated.
        messages: fields that hold messages or items, of which there may be only so many.
    """

    names: frozenset[str] = frozenset()
    sizes: Mapping[str, int | None] = field(default_factory=lambda: _NO_SIZES)
    prompts: frozenset[str] = frozenset()
    token_ids: frozenset[str] = frozenset()
    messages: frozenset[str] = frozenset()

    @property
    def known(self) -> frozenset[str]:
        """All of them."""
        return self.names | self.sizes.keys()


def joined(*tables: BodyFields) -> BodyFields:
    """The fields of several dialects, which must agree about the sizes of those that they share."""
    sizes: dict[str, int | None] = {}
    for table in tables:
        for name, size in table.sizes.items():
            if sizes.setdefault(name, size) != size:
                raise ValueError(f"{name} has two sizes: {sizes[name]} and {size}")
    return BodyFields(
        names=frozenset().union(*(table.names for table in tables)),
        sizes=MappingProxyType(sizes),
        prompts=frozenset().union(*(table.prompts for table in tables)),
        token_ids=frozenset().union(*(table.token_ids for table in tables)),
        messages=frozenset().union(*(table.messages for table in tables)),
    )
