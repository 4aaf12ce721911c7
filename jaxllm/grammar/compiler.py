"""The compiler's process: JSON lines in, JSON lines out; it may be killed at any time.

The first line holds the id of each special token and the budget of a job; its reply says that the
process is ready. Each later line is a job, which runs in a fork. Replies are:

- {"grammar": text};
- {"error": reason}, also where the job needs too much memory;
- {"spent": true} where the job exceeded its processor time, at which the kernel kills the fork;
- {"killed": signal} where the fork was killed from outside.
"""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from jaxllm.grammar.completable import completable
from jaxllm.grammar.lark import STRICT, composed, literal, schema_options, special
from jaxllm.grammar.limits import FORCED, MEMORY_BYTES, STEP_SECONDS, STEPS, parser_limits
from jaxllm.grammar.reasons import plain
from jaxllm.grammar.structure import checked_schema
from jaxllm.grammar.texts import Regexes, quoted

# The one signal that ends a fork and no limit sends: it comes when the machine is out of memory
FROM_OUTSIDE = {signal.SIGKILL}
# llguidance's Lark: its strings, regular expressions and comments, which may hold anything, and the
# keyword before an embedded JSON schema
LARK_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\x00-\x1f\x7f])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/|(?P<json>%json\b)\s*'
)


class ByteTokens:
    """A tokenizer with one token per byte and the model's special tokens at their ids. It is quick
    to make, and enough to run a grammar."""

    bos_token_id = None

    def __init__(self, specials: dict[str, int]):
        taken = {id: text for text, id in specials.items()}
        free = [id for id in range(256 + len(taken)) if id not in taken]
        self._of_byte = dict(enumerate(free[:256]))
        self.eos_token_id = 1 + max(*free, *taken)  # an id of its own
        self.tokens = [b""] * self.eos_token_id + [b"<eos>"]
        for byte, id in self._of_byte.items():
            self.tokens[id] = bytes([byte])
        for id, text in taken.items():
            self.tokens[id] = text.encode()
        self.special_token_ids = [*taken, self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        """Token ids of a text."""
        return [
            self._of_byte[byte] for byte in (text if isinstance(text, bytes) else text.encode())
        ]


def compiled(job: dict[str, Any], specials: dict[str, int], tokenizer: LLTokenizer) -> str:
    """The grammar of a job. Raises ValueError when it does not compile, allows no token, or takes
    too long for a mask."""
    grammar = convert(job, specials, Regexes(tokenizer))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    _try_out(matcher, _first)
    matcher.reset()
    _try_out(matcher, functools.partial(_last, end=tokenizer.eos_token))
    return grammar


def _try_out(matcher: LLMatcher, choose: Callable[[bytes], int]) -> None:
    """Follow a grammar for some tokens, of which those do not count that must come, such as what
    begins a call. Raises ValueError as `compiled`."""
    left = STEPS
    for _ in range(FORCED + STEPS):
        _check(matcher)
        if matcher.is_stopped() or not left:
            break
        start = time.process_time()
        mask = matcher.compute_bitmask()
        took = time.process_time() - start
        _check(matcher)
        if took > STEP_SECONDS:
            raise ValueError(
                "finding the tokens that may come next takes too long "
                f"({took * 1e3:.0f} ms, the limit is {STEP_SECONDS * 1e3:.0f})"
            )
        left -= int.from_bytes(mask).bit_count() > 1
        matcher.consume_token(choose(mask))


def _check(matcher: LLMatcher) -> None:
    """Raises ValueError when a matcher has failed."""
    if matcher.is_error():
        raise ValueError(plain(matcher.get_error()))


def _first(mask: bytes) -> int:
    """The lowest allowed token; in most grammars a plain character, which does not end the text."""
    index = next(index for index, byte in enumerate(mask) if byte)
    return index * 8 + (mask[index] & -mask[index]).bit_length() - 1


def _last(mask: bytes, end: int) -> int:
    """The highest allowed token that is not the end: it leads where `_first` does not."""
    allowed = int.from_bytes(mask, "little")
    return (allowed & ~(1 << end) or allowed).bit_length() - 1


def answer(line: str, specials: dict[str, int], tokenizer: LLTokenizer) -> dict[str, str]:
    """The reply to one job, also after a panic in native code, which is no Exception."""
    try:
        return {"grammar": compiled(json.loads(line), specials, tokenizer)}
    except (KeyboardInterrupt, SystemExit):
        raise
    except ValueError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "it takes too much memory to compile"}
    except BaseException as error:
        return {"error": f"it cannot be compiled ({type(error).__name__})"}


def serve(lines: TextIO, out: TextIO) -> None:
    """Answer jobs until the end of `lines`."""
    hello = json.loads(next(lines))
    specials = hello["specials"]
    seconds = hello["seconds"]
    tokenizer = LLTokenizer(TokenizerWrapper(ByteTokens(specials)))
    _say({}, out)
    for line in lines:
        if (fork := os.fork()) == 0:
            # Processor time; SIGPROF ends a process that does not handle it
            signal.setitimer(signal.ITIMER_PROF, seconds)
            reply = answer(line, specials, tokenizer)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _say(reply, out)
            os._exit(0)
        status = os.waitpid(fork, 0)[1]
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in FROM_OUTSIDE:
            _say({"killed": os.WTERMSIG(status)}, out)
        elif status:
            _say({"spent": True}, out)


def _say(reply: dict[str, Any], out: TextIO) -> None:
    out.write(json.dumps(reply) + "\n")
    out.flush()


def convert(
    job: Mapping[str, Any], specials: Mapping[str, int], regexes: Regexes | None = None
) -> str:
    """The grammar of a job in llguidance's serialised form.

    Args:
        specials: the id of each text that the tokenizer makes one token of.
        regexes: answers questions about texts on the way; by default a new one.

    Raises:
        ValueError: the job has no grammar.
    """
    if regexes is None:
        regexes = Regexes(LLTokenizer(TokenizerWrapper(ByteTokens({}))))
    form = job["kind"]
    value = job["value"]
    if form == "regex":
        if (len(value) - len(value.rstrip("\\"))) % 2:
            # regex_to_lark would drop it
            raise ValueError("it ends with a backslash that escapes nothing")
        # \d is 0 to 9 alone
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(value, 'd')}/")
    if form == "grammar":
        return LLMatcher.grammar_from_lark(_lark(value, regexes))
    if form == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(quoted, value)))
    if form == "pieces":
        return composed(job, specials, regexes, convert)
    if form == "structural_tag":
        return _tagged(value["tags"], job["whitespace"], specials, regexes)
    if form == "json_object":
        schema = {"type": "object"}
    else:
        schema = value
    schema = schema_options(schema, job["whitespace"], regexes)
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _lark(text: str, regexes: Regexes) -> str:
    """Lark, or GBNF, which has `::=`, as Lark; the rules of `json` hold for every schema in it."""
    try:
        text = any_to_lark(text)
    except Exception as error:
        raise ValueError(f"not a GBNF grammar: {error}") from None
    parts = []
    done = 0
    while (token := LARK_TOKEN.search(text, done)) is not None:
        parts.append(text[done : token.end()])
        done = token.end()
        if token["json"] is not None:
            schema, done = _embedded(text, done, regexes)
            parts.append(schema)
    return "".join(parts) + text[done:]


def _embedded(text: str, start: int, regexes: Regexes) -> tuple[str, int]:
    """The schema that stands in Lark at `start`, checked, and where it ends. Its `x-guidance` may
    set whitespace and separators."""
    try:
        schema, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema of %json is not valid JSON: {str(error)[:200]}") from None
    schema = checked_schema("the schema of %json", schema)
    if isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        if not isinstance(options, dict):
            raise ValueError("x-guidance of %json must be an object")
        schema = completable(schema, regexes)
        if isinstance(schema, dict):
            schema |= {"x-guidance": options | STRICT}
    return json.dumps(schema), end


def _tagged(
    tags: list[dict[str, Any]],
    whitespace: str | None,
    specials: Mapping[str, int],
    regexes: Regexes,
) -> str:
    """Free text, in which each trigger starts one of its tags, to the tag's end."""
    lines = [
        "%llguidance {}",
        f"start: ({' | '.join(f'tag_{n}' for n in range(len(tags)))})* free",
        "free: FREE",
        "FREE: /(.|\\n)*/",
    ]
    for n, tag in enumerate(tags):
        trigger = tag["trigger"]
        rest = tag["begin"][len(tag["trigger"]) :]
        if trigger in specials:  # ends the free text, which has no special tokens
            head = f"FREE {special(specials[trigger])}"
        else:
            lines.append(f"head_{n}[lazy]: FREE {quoted(trigger)}")
            head = f"head_{n}"
        schema = json.dumps(schema_options(tag["schema"], whitespace, regexes))
        begin = literal(rest, specials)
        end = literal(tag["end"], specials)
        lines.append(f"tag_{n}: {head} {begin} %json {schema} {end}")
    return LLMatcher.grammar_from_lark("\n".join(lines))


def main() -> None:
    """Run the compiler's process."""
    # Sent to every process of a service; requests in flight may still need this one
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(sys.stdin, sys.stdout)
