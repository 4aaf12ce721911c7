"""Grammars in the engine: requests that wait for theirs, and the guide of each choice that runs.
Imports no jax."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace

import numpy as np

from jaxllm.engine.scheduling.request import LogitsOptions, Request
from jaxllm.grammar.limits import STEP_SECONDS, TOGETHER_SECONDS, fair_share
from jaxllm.grammar.matcher import GrammarError, Matcher, Matchers
from jaxllm.grammar.parallel_matchers import ParallelMatchers
from jaxllm.messages import GenerateRequest, RequestError
from jaxllm.sampling.bits import everything, nothing_but, packed
from jaxllm.sampling.constraint import ConstraintError
from jaxllm.sampling.options import SamplingParams

logger = logging.getLogger("jaxllm")

FEW = 8  # tokens; fewer are told one after another sooner than threads wake


class GrammarState:
    """A choice's grammar at work: its matcher, and what is known of it without asking that."""

    def __init__(self, matcher: Matcher, params: SamplingParams, plain: bool, jumps: bool):
        self.matcher = matcher
        self.plain = plain  # whether nothing else decides which tokens may come next
        self.jumps = jumps  # whether a token that must come next is as good as drawn
        self.ended = False  # whether nothing may follow
        self.failed: str | None = None  # why the grammar is of no use any more
        self._ignores = params.ignore_eos
        self.left = params.min_tokens  # tokens before it may stop

    @property
    def holds_back(self) -> bool:
        """Whether the end of the sequence has to wait while other tokens may come."""
        return self._ignores or self.left > 0

    def advance(self, token: int) -> None:
        """It was said."""
        try:
            _contained(self.matcher.advance, [token])
        except ConstraintError as error:
            self.failed = str(error)
        self.advanced()

    def advanced(self) -> None:
        """The matcher has been told a token."""
        self.left = max(0, self.left - 1)
        self.ended = self.failed is None and self.matcher.ended


class Grammars:
    """Of one engine; not thread-safe. A grammar is built in a thread, and its request is scheduled
    when it is there.

    Without a tokenizer there are no `matchers`, and no request has a grammar.
    """

    def __init__(self, matchers: Matchers | None, vocab_size: int, eos: Iterable[int]):
        self._matchers, self._eos_W, self._everything_W = (
            matchers,
            packed(eos, vocab_size),
            everything(vocab_size),
        )
        self._together = None if matchers is None else ParallelMatchers()
        self._slow = False  # the last masks kept everybody waiting
        self._seated = 0  # choices that have a guide
        self._found: list[Request] = []  # those whose masks are looked for, or were last; by row of
        self._bits_RW = np.zeros((0, 0), np.uint32)
        self._row: dict[Request, int] = {}
        self._guides: list[GrammarState] = []
        # The rows that leave something, and that nothing else decides about
        self._whole: dict[Request, int] = {}
        # The choices of one request in their order
        self._waiting: dict[Request, Future[Matcher]] = {}
        # Called in any thread when a grammar has been built
        self.heard: Callable[[], None] = lambda: None

    @property
    def waiting(self) -> int:
        """Requests whose grammar is not there yet."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether requests wait, and none can be scheduled yet."""
        return bool(self._waiting) and not any(future.done() for future in self._first().values())

    def check(self, request: GenerateRequest) -> None:
        """Raises RequestError when it asks for structured output that cannot be here."""
        if self._matchers is None and request.grammar is not None:
            raise RequestError("structured output needs a tokenizer", "structured_outputs")
        if request.params.structured_outputs is not None:
            raise RequestError(
                "structured output has to be compiled by the front end (grammar.checker)",
                "structured_outputs",
            )

    def begin(self, request: Request, grammar: str) -> None:
        """Build the grammar of a new request."""
        assert self._matchers is not None, "refused by check"
        self._waiting[request] = future = self._matchers.begin(grammar)
        future.add_done_callback(lambda _: self.heard())

    def ready(self, idle: bool) -> list[tuple[Request, str | None]]:
        """Requests that have their guide now, and those that cannot have one, with the reason. An
        `idle` engine waits for the first. Choices of one request come in their order: the first is
        the one that computes the prompt."""
        if idle:
            wait(self._first().values(), return_when=FIRST_COMPLETED)
        held: set[str] = set()
        done: list[Request] = []
        for request, future in self._waiting.items():
            if request.id not in held and future.done():
                done.append(request)
            else:
                held.add(request.id)
        return [(request, self._seat(request, self._waiting.pop(request))) for request in done]

    def follow(self, emitters: Sequence[Request | None], tokens: Sequence[int]) -> None:
        """Tell the guides of these requests the tokens that were drawn, all at once; their `failed`
        and `ended` are those after it."""
        if not self._seated or self._together is None:
            return
        drawn = [
            (request, token)
            for request, token in zip(emitters, tokens, strict=True)
            if request is not None and token >= 0
        ]
        told = [
            (guide, token)
            for request, token in drawn
            if (guide := request.guide) is not None and not (request.jumped or request.dead_end)
        ]
        if len(told) < FEW:
            for guide, token in told:
                guide.advance(token)
            return
        try:
            followed = _contained(
                self._together.advance,
                [guide.matcher for guide, _ in told],
                [token for _, token in told],
            )
        except ConstraintError as error:  # nobody knows which of them were told
            for guide, _ in told:
                guide.failed = str(error)
            return
        for (guide, token), well in zip(told, followed, strict=True):
            if not well:
                guide.failed = _failure(guide.matcher, f"token {token} does not follow the grammar")
            guide.advanced()

    def look(self, asking: Sequence[Request]) -> None:
        """Start to find the masks of those who have a guide and may go on, beside what the caller
        does until `looked`. Meanwhile a matcher may be asked only through this object."""
        if not self._seated or self._together is None:
            return
        going = [
            (r, guide)
            for r in asking
            if (guide := r.guide) is not None
            and not guide.ended
            and guide.failed is None
            and not r.dead_end
        ]
        self._found, self._guides = [request for request, _ in going], [guide for _, guide in going]
        self._row = {request: row for row, request in enumerate(self._found)}
        if not self._slow:
            self._together.begin([guide.matcher for guide in self._guides])

    def looked(self) -> list[Request]:
        """Wait for the masks. Who of the requests has but one token that may come next, so that it
        is worth asking what is `forced`."""
        if not self._seated or self._together is None or not self._found:
            return []
        try:
            bits_RW = _contained(self._measured if self._slow else self._together.masks)
        except ConstraintError:
            self._together.settle()
            bits_RW = self._one_by_one()
        self._bits_RW = bits_RW[:, : self._eos_W.size]
        self._slow = self._together.took > min(TOGETHER_SECONDS, STEP_SECONDS * len(self._guides))
        for guide in self._guides:
            if guide.matcher.failed and guide.failed is None:
                guide.failed = _failure(guide.matcher, "the grammar failed")
        top_R = self._hold_back(
            [row for row, guide in enumerate(self._guides) if guide.plain and guide.holds_back]
        )
        alone_R = (self._bits_RW.sum(1, dtype=np.uint32) == top_R) & (
            top_R & (top_R - np.uint32(1)) == 0
        )
        alone = np.flatnonzero(alone_R).tolist()
        for row in alone:
            self._spell(row)
        some_R = top_R.tolist()
        self._whole = {
            r: row
            for r, row in self._row.items()
            if (guide := self._guides[row]).plain
            and guide.failed is None
            and some_R[row]
            # Which min_tokens forbids
            and not (guide.left and nothing_but(self._bits_RW[row], r.stops))
        }
        return [self._found[row] for row in alone]

    def token_bitmask(self, requests: Sequence[Request], allowed_RW: np.ndarray) -> bool:
        """Write the masks of all these requests, or nothing where one of them is not only a matter
        of its grammar."""
        rows = [self._whole.get(request) for request in requests]
        if None in rows:
            return False
        # Which copies whole rows
        np.take(
            self._bits_RW, np.array(rows, np.intp), axis=0, out=allowed_RW[: len(rows)], mode="clip"
        )
        return True

    def mask(self, request: Request, allowed_W: np.ndarray) -> None:
        """Clear the bits of tokens that a request's grammar does not allow next. Raises
        ConstraintError when that has failed."""
        guide = request.guide
        assert guide is not None
        if guide.failed is not None:
            raise ConstraintError(guide.failed)
        np.bitwise_and(allowed_W, self._bits_RW[self._row[request]], out=allowed_W)
        if guide.holds_back:
            onward_W = allowed_W & ~self._eos_W
            if onward_W.any():
                allowed_W[:] = onward_W

    def forced(self, request: Request) -> list[int]:
        """The tokens that must come next, when they are as good as drawn."""
        guide = request.guide
        if guide is None or not guide.jumps or guide.failed is not None:
            return []
        try:
            forced = _contained(guide.matcher.forced)
        except ConstraintError:
            return []  # its mask will say so
        # Which min_tokens forbids: no draw says it
        early = (at for at, token in enumerate(forced[: guide.left]) if token in request.stops)
        return forced[: next(early, len(forced))]

    def complete(self, request: Request) -> bool:
        """Whether a request's text may end here."""
        if self._together is not None:
            self._together.settle()
        return request.guide is not None and request.guide.matcher.complete

    def release(self, request: Request) -> None:
        """It has ended."""
        future = self._waiting.pop(request, None)
        if future is not None:
            future.cancel()
        if request.guide is not None and self._matchers is not None and self._together is not None:
            self._together.settle()
            self._matchers.give_back(request.guide.matcher)
            request.guide = None
            self._seated -= 1

    def _first(self) -> dict[str, Future[Matcher]]:
        """What the first waiting choice of each request waits for."""
        return {request.id: future for request, future in reversed(self._waiting.items())}

    def _seat(self, request: Request, future: Future[Matcher]) -> str | None:
        """Give a request its guide, or say why it cannot have one."""
        params, asked = request.params, request.asked or LogitsOptions(self._everything_W)
        plain = not asked.constraints and bool((asked.allowed_W == self._everything_W).all())
        # Nobody looks at its draws
        unseen = (
            params.logprobs is None and params.prompt_logprobs is None and params.best_of is None
        )
        try:
            matcher = _contained(future.result)
        except ConstraintError as error:
            return str(error)
        request.guide, request.asked = (
            GrammarState(matcher, params, plain, request.asked is None and unseen),
            replace(asked, guided=True),
        )
        self._seated += 1
        return None

    def _spell(self, row: int) -> None:
        """Mend a mask that leaves one token alone."""
        guide = self._guides[row]
        try:
            _contained(guide.matcher.spell, self._bits_RW[row])
        except ConstraintError as error:
            guide.failed = guide.failed or str(error)

    def _hold_back(self, held: list[int]) -> np.ndarray:
        """Clear the ends of the sequence in these rows of the masks, but where nothing else is
        left. The largest word of each row."""
        words = np.flatnonzero(self._eos_W)
        cells = np.ix_(held, words)
        kept = self._bits_RW[cells]
        self._bits_RW[cells] = kept & ~self._eos_W[words]
        top_R: np.ndarray = self._bits_RW.max(1)
        for at, row in enumerate(held):
            if not top_R[row]:
                self._bits_RW[row, words] = kept[at]
                top_R[row] = kept[at].max(initial=0)
        return top_R

    def _measured(self) -> np.ndarray:
        """The masks, since the last ones kept everybody waiting, each with what it costs: grammars
        that take more than their share fail. On a busy machine that may be none."""
        assert self._together is not None
        limit = fair_share(len(self._guides), os.cpu_count() or 1)
        bits_RW, costs = self._together.measured([guide.matcher for guide in self._guides])
        self._together.took = 0.0
        for guide, cost in zip(self._guides, costs, strict=True):
            if cost > limit and guide.failed is None:
                spent = f"{cost * 1e3:.0f} ms, the limit is {limit * 1e3:.0f}"
                guide.failed = f"finding the tokens that may come next takes too long ({spent}); simplify the grammar"
        return bits_RW

    def _one_by_one(self) -> np.ndarray:
        """The masks again, where something failed as they were looked for together."""
        bits_RW = np.tile(self._everything_W, (len(self._guides), 1))
        for guide, bits_W in zip(self._guides, bits_RW, strict=True):
            try:
                _contained(guide.matcher.mask, bits_W)
            except ConstraintError as error:
                guide.failed = str(error)
        return bits_RW


def _failure(matcher: Matcher, otherwise: str) -> str:
    """Why a matcher failed, for the client."""
    try:
        _contained(matcher.check)
    except ConstraintError as error:
        return str(error)
    return f"structured output: {otherwise}"


def _contained[**P, T](work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` gives; whatever it raises is a ConstraintError, also a panic in native code,
    which is no Exception."""
    try:
        return work(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit):
        raise
    except GrammarError as error:
        raise ConstraintError(f"structured output: {error}") from None
    except BaseException as error:
        logger.error("a grammar failed: %s: %s", type(error).__name__, error)
        raise ConstraintError("structured output: the grammar failed") from None
