"""A model that says what a test wishes, as far as the grammar of its request allows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.output.detok import Detokenizer
from jaxllm.grammar.matcher import GrammarError, Matcher, Matchers
from jaxllm.messages import GenerateRequest, RequestTimes, TextDelta
from jaxllm.server.state import Settings
from jaxllm.tokenizer import Tokenizer
from tests.server.answers.worlds import ENDS
from tests.server.fake import Control, FakeEngine, _Job
from tests.server.harness import SETTINGS, Running

LENGTH = 1 << 14  # of a context, in tokens
MOST = 6000  # tokens of an answer that a test waits for
# How an answer that has nothing more to say comes to its end. Within a text most closers are text
# again, so one is chosen by chance
CLOSERS = (
    *('"', "}", "]", ")", ",", ":", ">", "\n"),
    *("<｜tool▁calls▁end｜>", "<|tool_calls_section_end|>"),
    *("</think>", "</seed:think>", "[/THINK]", "Here is my response:", "<|end|>"),
    *("</parameter>", "\n</parameter>", "</arg_value>", "<escape>"),
    *(
        "/function>",
        "</function>",
        "</invoke>",
        "</tool_call>",
        "</seed:tool_call>",
        "</minimax:tool_call>",
    ),
)


class Speaker:
    """Draws one choice's tokens. Raises GrammarError when the grammar fails.

    A wished token that the grammar does not allow is left out; where only one token is allowed,
    that one is said. Without a wish left, the answer is brought to an end.
    """

    def __init__(self, wish: list[int], matcher: Matcher | None, world: Vocabulary):
        self._wish, self._matcher, self._world = wish, matcher, world
        self._at = 0
        self._random = random.Random(repr(wish))
        self._closing: list[int] = []

    def next_token(self) -> int:
        """The next token; an end token where the answer ends."""
        if self._matcher is None:
            token = self._wish[self._at] if self._at < len(self._wish) else self._world.eos
            self._at += 1
            return token
        token = self._drawn(self._matcher)
        self._matcher.accept_tokens([token])
        return token

    @property
    def ended(self) -> bool:
        """Nothing may follow."""
        return self._matcher is not None and self._matcher.ended

    def _drawn(self, matcher: Matcher) -> int:
        bits_W = np.full(matcher.mask_words, 2**32 - 1, np.uint32)
        matcher.apply_mask(bits_W)
        allowed = np.flatnonzero(np.unpackbits(bits_W.view(np.uint8), bitorder="little")).tolist()
        if not allowed:
            raise GrammarError("the grammar allows nothing, and its text is not complete")
        choices = frozenset(allowed)
        if len(allowed) == 1 and self._wish[self._at : self._at + 1] != allowed:
            return allowed[0]
        while self._at < len(self._wish):
            token = self._wish[self._at]
            self._at += 1
            if token in choices:
                return token
        return self._closing_token(matcher, allowed)

    def _closing_token(self, matcher: Matcher, allowed: list[int]) -> int:
        """A token that leads towards the end."""
        if self._world.eos in allowed:
            return self._world.eos
        if self._closing and self._closing[0] in allowed:
            return self._closing.pop(0)
        closers = [
            closer
            for closer in self._world.closers
            if closer[0] in allowed and matcher.state.validate_tokens(closer) == len(closer)
        ]
        if closers:
            token, *self._closing = self._random.choice(closers)
            return token
        printable = [token for token in allowed if token in self._world.letters]
        return self._random.choice(printable or allowed)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens that a speaker knows by their meaning."""

    eos: int
    ends: frozenset[int]
    closers: tuple[list[int], ...]
    letters: frozenset[int]


class ScriptedEngine(FakeEngine):
    """Says the wish of its control to every request, several tokens a step."""

    def __init__(self, config: EngineConfig, control: Scripted, tokenizer: Tokenizer):
        super().__init__(config, control, tokenizer)
        ends = [tokenizer.encode(text)[0] for text in ENDS]
        width = tokenizer.backend.get_vocab_size(with_added_tokens=True)
        self.resolved = replace(self.resolved, vocab_size=width, max_model_len=LENGTH)
        self._script, self._tokens = control, tokenizer
        self._matchers = Matchers(tokenizer.backend, width, ends)
        closers = tuple(tokenizer.encode(text) for text in CLOSERS)
        letters = frozenset(tokenizer.encode("".join(map(chr, range(48, 123)))))
        self._vocabulary = Vocabulary(ends[0], frozenset(ends), closers, letters)
        self._speakers: dict[str, tuple[Speaker, Detokenizer, random.Random]] = {}

    def leave(self) -> None:
        self._matchers.end_threads()
        super().leave()

    def add(self, request: GenerateRequest) -> None:
        matcher = None
        if request.grammar is not None:
            matcher = self._matchers.start_matcher(request.grammar).result(60)
        self._script.constrained = request.grammar is not None
        self._script.said = []
        wish = self._tokens.encode(self._script.wish)
        self._speakers[request.id] = (
            Speaker(wish, matcher, self._vocabulary),
            Detokenizer(self._tokens.backend, request.prompt.tokens, request.params),
            random.Random(len(wish)),
        )
        super().add(request)

    def _advance(self, job: _Job, index: int) -> TextDelta:
        speaker, detokenizer, sizes = self._speakers[job.request.id]
        most = job.request.params.max_tokens
        ids: list[int] = []
        text = ""
        reason: str | None = None
        error: str | None = None
        for _ in range(sizes.choice((1, 1, 2, 3, 7))):
            try:
                token = speaker.next_token()
            except GrammarError as failure:
                reason = "error"
                error = str(failure)
                break
            ids.append(token)
            self._script.said.append(token)
            job.sent[index] += 1
            if token in self._vocabulary.ends:
                reason = "stop"
                break
            text += detokenizer.feed([token]).text
            if speaker.ended:
                reason = "stop"
            elif job.sent[index] == min(most or MOST, MOST):
                reason = "length"
            if reason is not None:
                break
        now = time.time()
        job.first = job.first or now
        times = None
        if reason is not None:
            text += detokenizer.finish()
            job.sent[index] = -1
            del self._speakers[job.request.id]
            times = RequestTimes(
                arrival=job.request.arrival, scheduled=now, first_token=job.first, last_token=now
            )
        return TextDelta(
            id=job.request.id,
            index=index,
            token_ids=ids,
            text=text,
            finish_reason=reason,
            times=times,
            error=error,
        )


class Scripted(Control):
    """Shared by a test and the engine's thread.

    Attributes:
        wish: what the model would say.
        constrained: whether the last request had a grammar.
        said: the tokens of the last answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wish = ""
        self.constrained = False
        self.said: list[int] = []


class ScriptedServer(Running):
    """A server whose model says wishes; see `Running`."""

    control: Scripted

    def __init__(self, tokenizer: Tokenizer, settings: Settings = SETTINGS):
        super().__init__(tokenizer, settings)
        self.control = Scripted()
        self.words = tokenizer

    def factory(self) -> Callable[..., FakeEngine]:
        def make(config: EngineConfig, on_phase: Callable[[str, float], None]) -> FakeEngine:
            on_phase("Loading nothing", 0.0)
            return ScriptedEngine(config, self.control, self.words)

        return make
