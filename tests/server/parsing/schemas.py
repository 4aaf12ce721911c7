"""Schemas of arguments with values that follow them, and walks along what grammars allow."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Iterable, Iterator
from typing import Any

from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jaxllm.grammar.compiler import ByteTokens, compiled
from jaxllm.grammar.limits import parser_limits
from jaxllm.grammar.meaning import Meaning
from jaxllm.grammar.pieces import Arguments, Composition, Either, Literal, Pieces
from jaxllm.server.parsing.calls import ToolParser

type Drawn = tuple[Any, st.SearchStrategy[Any]]  # a schema, and values that follow it

MOST = 6_000  # bytes of a walk
# Of JSON and of Python, and characters that patterns ask for
ENDS = (b'"', b"}", b"]", b")", b'"]', b'"}', b"b", b"1")

# Words that hold no part of a closing mark, beside texts that look like other types
WORDS = st.one_of(
    st.text(string.ascii_letters + " .é\n-:", max_size=12),
    st.sampled_from(["5", "true", "null", "[1]", '{"a": 1}', "", "\n", "1.5", "None", "<a>", "'"]),
)
OTHERS: list[Drawn] = [
    ({"type": "array", "items": {}}, st.just([["x"]])),
    ({"type": "null"}, st.none()),
]
NAMES = st.sampled_from(["a", "city", "n_2", "été", "x1", "kind", "Line"])


def texts() -> st.SearchStrategy[Drawn]:
    """Schemas of texts."""
    listed = st.lists(WORDS, min_size=1, max_size=3, unique=True)
    return st.one_of(
        st.just(({"type": "string"}, WORDS)),
        WORDS.map(lambda word: ({"const": word}, st.just(word))),
        listed.map(lambda words: ({"enum": words}, st.sampled_from(words))),
        listed.map(lambda words: ({"type": "string", "enum": words}, st.sampled_from(words))),
        st.just(({"minLength": 2, "maxLength": 4}, st.text("ab", min_size=2, max_size=4))),
        st.just(({"pattern": "^[a-c]+[0-9]?$"}, st.from_regex(r"\A[a-c]+[0-9]?\Z"))),
        st.just(({"type": "string", "pattern": "b"}, WORDS.map(lambda word: word + "b"))),
        st.just(({"type": "string", "format": "date"}, st.dates().map(str))),
        st.just(({"type": "string", "format": "uuid"}, st.uuids().map(str))),
        st.just(({"type": "string", "format": "ipv4"}, st.ip_addresses(v=4).map(str))),
    )  # fmt: skip


def scalars() -> st.SearchStrategy[Drawn]:
    """Schemas of values that are no texts and hold none."""
    numbers = st.floats(-1e6, 1e6, allow_nan=False).map(lambda number: round(number, 3))
    return st.one_of(
        st.just(({"type": "integer"}, st.integers(-(10**12), 10**12))),
        st.just(({"minimum": 0, "maximum": 50}, st.integers(0, 50))),
        st.just(({"type": "number"}, numbers)),
        st.just(({"type": "boolean"}, st.booleans())),
        st.just(({"enum": [1, None, True]}, st.sampled_from([1, None, True]))),
        st.just(({"const": 7}, st.just(7))),
        st.just(({"type": ["integer", "null"]}, st.sampled_from([None, 3]))),
    )


@st.composite
def values(draw: st.DrawFn, definitions: dict[str, Any], depth: int = 2) -> Drawn:
    """A schema of a value, which may refer to definitions, and adds some."""
    kinds = ["text", "scalar", "scalar"]
    kinds += ["list", "object", "both", "referred", "all", "any"] if depth else []
    kind = draw(st.sampled_from(kinds))
    if kind == "text":
        return draw(texts())
    if kind == "scalar":
        return draw(scalars())
    if kind == "any":
        return {}, st.one_of(
            st.text(string.ascii_letters + " ", max_size=8),
            st.lists(st.integers(), max_size=2),
            st.just({"k": ["v"]}),
        )
    if kind == "object":
        return draw(objects(definitions, depth - 1))
    schema, found = draw(values(definitions, depth - 1))
    if kind == "list":
        word = {"type": "array"} if draw(st.booleans()) else {}
        return word | {"items": schema}, st.lists(found, max_size=2)
    if kind == "both":
        other, more = draw(st.sampled_from(OTHERS))
        if _may_be_text(schema, definitions):
            return schema, found  # both would be read as text
        return {"anyOf": [schema, other]}, st.one_of(found, more)
    if kind == "all":
        return {"allOf": [schema], "description": "a"}, found
    name = draw(st.sampled_from(["d", "a/b", "c[d", "e~f", "g%h"])) + str(len(definitions))
    definitions[name] = schema
    written = name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
    written = written.replace("[", "%5B") if draw(st.booleans()) else written
    return {"$ref": f"#/$defs/{written}"}, found


def _may_be_text(schema: Any, definitions: dict[str, Any]) -> bool:
    """Whether what is no text might be read as one."""
    meaning = Meaning(schema, {"$defs": definitions})
    return meaning.any_text or meaning.free or "null" in meaning.texts


@st.composite
def objects(draw: st.DrawFn, definitions: dict[str, Any], depth: int = 2) -> Drawn:
    """A schema of an object, in one of some forms."""
    names = draw(st.lists(NAMES, max_size=4, unique=True))
    parts = {name: draw(values(definitions, depth)) for name in names}
    required = [name for name in names if draw(st.booleans())]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: part for name, (part, _) in parts.items()},
        "required": required,
        "additionalProperties": False,
    }
    found = st.fixed_dictionaries(
        {name: value for name, (_, value) in parts.items() if name in required},
        optional={name: value for name, (_, value) in parts.items() if name not in required},
    )
    form = draw(st.sampled_from(["plain", "plain", "patterns", "split", "free"]))
    if form == "patterns":
        schema["patternProperties"] = (
            {f"^({'|'.join(names)})$": {}} if names else {"^x_": {"type": "integer"}}
        )
    elif form == "split":
        rest = {key: schema.pop(key) for key in ("required", "type")}
        schema["allOf"] = [rest]
    elif form == "free" and not names:
        del schema["additionalProperties"]
        free = st.dictionaries(
            NAMES, st.text(string.ascii_letters, min_size=1, max_size=5), max_size=2
        )
        return schema, free
    return schema, found


@st.composite
def arguments(draw: st.DrawFn) -> Drawn:
    """A schema of a tool's arguments, and arguments that follow it."""
    definitions: dict[str, Any] = {}
    schema, found = draw(objects(definitions))
    if draw(st.booleans()):
        definitions["root"] = schema
        schema = {"$ref": "#/$defs/root"}
    return schema | ({"$defs": definitions} if definitions else {}), found


def job_of(parser: type[ToolParser], schema: Any) -> dict[str, Any]:
    """The compiler's job of one call of the tool f."""
    section = parser.section
    pieces: Pieces = (Literal(section.begin), *parser.pieces("f", schema, 0), Literal(section.end))
    job: dict[str, Any] = json.loads(json.dumps(Composition("calls", pieces).job()))
    return job


class Walker:
    """Walks along what a grammar allows, by bytes and special tokens, to its end."""

    def __init__(self, specials: Iterable[str] = ()):
        self.specials = {text: 300 + number for number, text in enumerate(specials)}
        self.tokens = ByteTokens(self.specials)
        self._vocabulary = LLTokenizer(TokenizerWrapper(self.tokens))

    def grammar(self, job: dict[str, Any]) -> str:
        """The grammar of a job. Raises ValueError as the compiler's process refuses it."""
        return compiled(job, self.specials, self._vocabulary)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the grammar's start."""
        return LLMatcher(self._vocabulary, grammar, log_level=0, limits=parser_limits())

    def allows(self, grammar: str, text: str) -> bool:
        """Whether a text follows a grammar."""
        matcher = self.matcher(grammar)
        said = self._tokens(text)
        return matcher.validate_tokens(said) == len(said) and bool(
            matcher.consume_tokens(said) and matcher.is_accepting()
        )

    def walk(self, grammar: str, seed: int, ends: Iterable[bytes] = ENDS) -> str:
        """A text of the grammar by random tokens, in which `ends` are often tried. Fails where
        nothing can follow before the end."""
        matcher = self.matcher(grammar)
        rng = random.Random(seed)
        said: list[int] = []
        tried = [self._tokens(end.decode()) for end in ends]
        while not matcher.is_stopped():
            assert not matcher.is_error(), (self._text(said), matcher.get_error())
            assert len(said) < MOST, self._text(said)
            end = rng.choice(tried)
            if rng.random() < 0.2 + len(said) / MOST and matcher.validate_tokens(end) == len(end):
                assert matcher.consume_tokens(end)
                said += end
                continue
            mask = matcher.compute_bitmask()
            allowed = [
                at * 8 + bit for at, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1
            ]
            assert allowed and not matcher.is_error(), (self._text(said), matcher.get_error())
            if self.tokens.eos_token_id in allowed:
                break
            token = rng.choice(allowed)
            assert matcher.consume_token(token)
            said.append(token)
        return self._text(said)

    def _tokens(self, text: str) -> list[int]:
        """Ids of a text, in which special tokens are tokens."""
        found: list[int] = []
        while text:
            word = next((word for word in self.specials if text.startswith(word)), "")
            found += [self.specials[word]] if word else self.tokens(text[0])
            text = text[len(word or text[0]) :]
        return found

    def _text(self, said: list[int]) -> str:
        return b"".join(self.tokens.tokens[token] for token in said).decode(errors="replace")


def ends_of(pieces: Pieces) -> tuple[bytes, ...]:
    """Marks that end keys and values in the layouts of a call, and the call's end."""
    return (*ENDS, *(mark.encode() for mark in _marks(pieces) if mark))


def _marks(pieces: Pieces) -> Iterator[str]:
    for piece in pieces:
        if isinstance(piece, Arguments):
            yield from (*(piece.layout.text or ()), *piece.layout.json)
        elif isinstance(piece, Either):
            for option in piece.options:
                yield from _marks(option)
    last = pieces[-1]
    if isinstance(last, Literal):
        yield last.text
