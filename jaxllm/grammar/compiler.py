"""The compiler's process: JSON lines in, JSON lines out; it may be killed at any time.

The first line holds the id of each special token and the budget of a job; its reply says that the
process is ready. Each later line is a job, which runs in a fork. Replies are:

- {"grammar": text};
- {"error": reason}, also where the job needs too much memory;
- {"spent": true} where the job exceeded its processor time, at which the kernel kills the fork;
- {"killed": signal} where the fork was killed from outside.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from typing import Any, TextIO

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jaxllm.grammar.convert import convert
from jaxllm.grammar.limits import MEMORY_BYTES, STEP_SECONDS, STEPS, parser_limits

# Signals that no limit of a fork sends; SIGKILL comes when the machine is out of memory
FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP}


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
    grammar = convert(job, specials)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    for _ in range(STEPS):
        _check(matcher)
        if matcher.is_stopped():
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
        matcher.consume_token(_first(mask))
    return grammar


def _check(matcher: LLMatcher) -> None:
    """Raises ValueError when a matcher has failed."""
    if matcher.is_error():
        raise ValueError(_plain(matcher.get_error()))


def _plain(error: str) -> str:
    """llguidance's message without its parser's state, and without an option that clients cannot
    set."""
    text = error.split("<non-verbose/>")[0].split("<state>")[0].strip()
    text = text.replace(
        "Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "Where several cases may match, write anyOf",
    )
    return "nothing that ends can match it" if text == "NoExtensionBias" else text


def _first(mask: bytes) -> int:
    """The lowest allowed token; in most grammars a plain character, which does not end the text."""
    at = next(at for at, byte in enumerate(mask) if byte)
    return at * 8 + (mask[at] & -mask[at]).bit_length() - 1


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
    specials, seconds = hello["specials"], hello["seconds"]
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


def main() -> None:
    """Run the compiler's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(sys.stdin, sys.stdout)
