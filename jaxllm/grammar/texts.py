"""Texts without quotes as Lark: patterns, formats and lengths of JSON schemas for raw text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from jaxllm.grammar.limits import parser_limits
from jaxllm.grammar.pieces import Rule

ANY = "/(?s:.*)/"
# Control characters that are white space for some regexes and for others not
NO_SEPARATORS = r"/[^\x1c-\x1f\x85]*/"
PLAIN = r"/[^\x00-\x1f\x7f]*/"
_ANCHORS = re.compile(r"\\.|\[(?:\\.|[^]\\])*]|[$^]", re.DOTALL)
_TOKEN = re.compile(r"\\.|\[\^?]?(?:\\.|[^]\\])*]|.", re.DOTALL)

_YEAR = "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26]|0[48])00)"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    rf"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = (
    r"(([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
    r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9]))"
)
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"({_OCTET}(\.{_OCTET}){{3}})"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"({_LABEL}(\.{_LABEL})*)"
_HEX = "[0-9A-Fa-f]{1,4}"
_LAST = f"({_HEX}:{_HEX}|{_IPV4})"
# Each line: so many groups before "::", so many behind it (RFC 4291, 2.2)
_IPV6 = "|".join(
    [
        f"({_HEX}:){{6}}{_LAST}",
        f"::({_HEX}:){{5}}{_LAST}",
        f"({_HEX})?::({_HEX}:){{4}}{_LAST}",
        f"(({_HEX}:){{0,1}}{_HEX})?::({_HEX}:){{3}}{_LAST}",
        f"(({_HEX}:){{0,2}}{_HEX})?::({_HEX}:){{2}}{_LAST}",
        f"(({_HEX}:){{0,3}}{_HEX})?::{_HEX}:{_LAST}",
        f"(({_HEX}:){{0,4}}{_HEX})?::{_LAST}",
        f"(({_HEX}:){{0,5}}{_HEX})?::{_HEX}",
        f"(({_HEX}:){{0,6}}{_HEX})?::",
    ]
)
# Formats that llguidance knows for JSON, as whole texts: RFC 3339 (dates, times, durations),
# RFC 5321, 1123, 4291, 4122 and 3986, without comments, quotes and address literals
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]+W|[0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D"
    r"|([0-9]+D)?T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S))",
    "email": rf"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]+)*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": f"({_IPV6})",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:/?#@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*",
    "unknown": r"(?s:.*)",
}


class Regexes:
    """Asks llguidance, whose regexes take linear time, about texts and keys."""

    def __init__(self, tokenizer: LLTokenizer):
        self._tokenizer = tokenizer
        self._empty: dict[str, bool] = {}  # answers so far
        self._reasons: dict[str, str] = {}

    def is_empty(self, expression: str) -> bool:
        """Whether no text follows a Lark expression of a terminal. Raises ValueError where it is
        no such expression."""
        if expression not in self._empty:
            self._empty[expression] = self._is_empty(expression)
        return self._empty[expression]

    def _is_empty(self, expression: str) -> bool:
        matcher = self._matcher(f"start: TEXT\nTEXT: {expression}")
        has_text = matcher.is_accepting() or any(matcher.compute_bitmask())
        return matcher.is_error() or not has_text

    def matches(self, expression: str, text: str) -> bool:
        """Whether a whole text follows an expression of a terminal."""
        matcher = self._matcher(f"start: TEXT\nTEXT: {expression}")
        return all(map(matcher.consume_token, self._tokenizer.tokenize_str(text))) and bool(
            matcher.is_accepting()
        )

    def only_of(self, pattern: str, names: Iterable[str]) -> list[str] | None:
        """The names in which a JSON schema's pattern is found, if it is found in no other text;
        None where it is."""
        try:
            texts = searched(pattern)
            if not self.is_empty(" & ".join([f"({texts})", *_none_of(names)])):
                return None
            return [name for name in names if self.matches(texts, name)]
        except ValueError:  # the compiler of JSON decides what it makes of such a pattern
            return None

    def leave_nothing(self, patterns: Iterable[str]) -> bool:
        """Whether each text without control characters has one of the patterns of a JSON
        schema."""
        try:
            absent = [f"~({searched(pattern)})" for pattern in patterns]
            return self.is_empty(" & ".join([PLAIN, *absent]))
        except ValueError:
            return False

    def why_not(self, grammar: str) -> str:
        """llguidance's reason why a grammar has no text; "" where it has."""
        if grammar not in self._reasons:
            self._reasons[grammar] = self._why_not(grammar)
        return self._reasons[grammar]

    def _why_not(self, grammar: str) -> str:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error()
        return ""

    def _matcher(self, lark: str) -> LLMatcher:
        grammar = LLMatcher.grammar_from_lark(lark)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error() and "NoExtensionBias" not in matcher.get_error():
            raise ValueError(matcher.get_error())
        return matcher


def expression(rules: Iterable[Rule], without: Sequence[str] = ()) -> str:
    """The Lark expression of a terminal: text that follows one of the rules, and holds none of
    some texts. Raises ValueError where a rule cannot be written so."""
    options = " | ".join(f"({_of_rule(rule)})" for rule in rules)
    if without:
        return f"({options}) & {_without(tuple(without))}"
    return f"({options})"


def searched(pattern: str) -> str:
    """The Lark expression of texts in which a JSON schema's pattern is found. Raises
    ValueError."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError(f"the pattern {pattern!r:.80} ends with a backslash that escapes nothing")
    return " | ".join(_searched_option(option, pattern) for option in _options(pattern))


def quoted(text: str) -> str:
    """A Lark string; its escapes are JSON's."""
    return json.dumps(text)


def _of_rule(rule: Rule) -> str:
    parts = []
    if rule.texts is not None:
        parts.append(" | ".join(map(quoted, rule.texts)))
    parts += [searched(pattern) for pattern in rule.patterns]
    if rule.patterns:
        parts.append(NO_SEPARATORS)
    parts += [_of_format(name) for name in rule.formats]
    if rule.whole:
        parts.append(_regex(rule.whole))
    if rule.least or rule.most is not None:
        most = "" if rule.most is None else rule.most
        parts.append(f"/(?s:.{{{rule.least},{most}}})/")
    absent = [f"~({searched(pattern)})" for pattern in rule.absent]
    absent += _none_of(rule.other_than)
    return " & ".join([*(f"({part})" for part in parts or [ANY]), *absent])


def _none_of(texts: Iterable[str]) -> list[str]:
    """What keeps texts from being one of these."""
    if options := " | ".join(map(quoted, texts)):
        return [f"~({options})"]
    return []


def _of_format(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"Unknown format: {name}")
    return _regex(FORMATS[name])


def _without(words: Sequence[str]) -> str:
    """Texts that hold none of some words.

    Where all begin with one character, which they hold nowhere else, as tags do, that is a regex
    of few states: other characters, and beginnings of words behind which no word goes on.
    """
    first = words[0][0]
    if any(word[0] != first or first in word[1:] for word in words):
        return " & ".join(f"~({ANY} {quoted(word)} {ANY})" for word in words)
    begun: dict[str, str] = {}  # what goes on behind the beginning of a word
    for word in words:
        for length in range(1, len(word)):
            begun[word[:length]] = begun.get(word[:length], "") + word[length]
    starts = "|".join(map(re.escape, begun))
    safe = "|".join(f"{re.escape(start)}{_none(first + more)}" for start, more in begun.items())
    return _regex(f"({_none(first)}|({starts})*({safe}))*({starts})*")


def _none(characters: str) -> str:
    """A regex of all characters but these."""
    return f"[^{''.join(map(re.escape, dict.fromkeys(characters)))}]"


def _regex(pattern: str) -> str:
    r"""A regex of whole texts as Lark; \d is 0 to 9 alone."""
    return f"/{regex_to_lark(pattern, 'd')}/"


def _searched_option(option: str, pattern: str) -> str:
    """Texts in which one option of a pattern is found."""
    starts = option.startswith("^")
    option = option[starts:]
    ends = option.endswith("$") and (len(option) - len(option[:-1].rstrip("\\"))) % 2 == 1
    option = option[: len(option) - ends]
    inner = _whole_group(option)
    if inner is not None and _anchored(option):
        options = (_searched_option(part, pattern) for part in _options(inner))
        texts = "(" + " | ".join(options) + ")"
        if starts or ends:
            raise ValueError(_anchors_inside(pattern))
        return texts
    if _anchored(option):
        raise ValueError(_anchors_inside(pattern))
    middle = f"({_regex(f'({option})')})" if option else ""
    before = "" if starts else ANY
    behind = "" if ends else ANY
    return " ".join(filter(None, (before, middle, behind))) or '""'


def _anchors_inside(pattern: str) -> str:
    return f"the pattern {pattern!r:.80} has ^ or $ inside, which only JSON formats can follow"


def _anchored(pattern: str) -> bool:
    """Whether a pattern holds an anchor."""
    return any(token in ("^", "$") for token in _ANCHORS.findall(pattern))


def _options(pattern: str) -> list[str]:
    """What stands between the bars of a pattern that are in no group."""
    options = [""]
    depth = 0
    for token in _TOKEN.findall(pattern):
        depth += (token == "(") - (token == ")")
        if token == "|" and not depth:
            options.append("")
        else:
            options[-1] += token
    return options


def _whole_group(pattern: str) -> str | None:
    """What stands in the one group that a pattern is; None where it is none."""
    depth = 0
    tokens = _TOKEN.findall(pattern)
    if len(tokens) < 2 or tokens[0] != "(" or tokens[-1] != ")":
        return None
    for index, token in enumerate(tokens):
        depth += (token == "(") - (token == ")")
        if not depth and index < len(tokens) - 1:
            return None
    inner = "".join(tokens[1:-1])
    if inner.startswith("?:"):
        return inner[2:]
    if inner.startswith("?"):
        return None
    return inner
