"""The grammars of an engine's requests: building them, following them, masks. Imports no jax."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from jaxllm.engine.scheduling.request import LogitsOptions, Request
from jaxllm.grammar.limits import STEP_SECONDS, TOGETHER_SECONDS, fair_share
from jaxllm.grammar.matcher import GrammarError, Matcher, Matchers, ParallelMatchers
from jaxllm.messages import GenerateRequest, RequestError
from jaxllm.sampling.bits import everything, nothing_but, packed
from jaxllm.sampling.constraint import ConstraintError
from jaxllm.sampling.options import SamplingParams

logger = logging.getLogger("jaxllm")

SEQUENTIAL = 8  # tokens; fewer are accepted one by one sooner than threads wake


class GrammarState:
    """The grammar of one running choice.

    Attributes:
        matcher: follows the choice's tokens.
        sole: no other option restricts the choice's tokens.
        may_jump: forced tokens may be appended without a draw.
        ended: the text is complete and nothing may follow.
        error: why the grammar can no longer be used, for the client.
        min_left: tokens before the choice may stop.
    """

    def __init__(self, matcher: Matcher, params: SamplingParams, sole: bool, may_jump: bool):
        self.matcher = matcher
        self.sole = sole
        self.may_jump = may_jump
        self.ended = False
        self.error: str | None = None
        self.min_left = params.min_tokens
        self._ignore_eos = params.ignore_eos

    @property
    def delays_eos(self) -> bool:
        """Whether end-of-sequence tokens are masked while other tokens are allowed."""
        return self._ignore_eos or self.min_left > 0

    @property
    def over(self) -> bool:
        """Whether nothing can follow: the text is complete, or the grammar has failed."""
        return self.ended or self.error is not None

    def accept_token(self, token: int) -> None:
        """Follow one generated token; a failure is kept in `error`."""
        try:
            _contained(self.matcher.accept_tokens, [token])
        except ConstraintError as error:
            self.error = str(error)
        self.count_token()

    def accept_tokens(self, tokens: list[int]) -> list[int]:
        """Follow generated tokens. Returns them up to the first after which it is over."""
        for count, token in enumerate(tokens, 1):
            self.accept_token(token)
            if self.over:
                return tokens[:count]
        return tokens

    def count_token(self) -> None:
        """Update the state after the matcher has accepted a token."""
        self.min_left = max(0, self.min_left - 1)
        self.ended = self.error is None and self.matcher.ended


class Grammars:
    """All grammars of one engine; not thread-safe.

    A grammar is built in a thread. Its request is scheduled once the grammar is there. Without a
    tokenizer no request has a grammar.

    Attributes:
        matchers: build grammars; None without a tokenizer.
        parallel: computes the masks of a step.
        states: of the scheduled choices that have a grammar.
        on_built: called, in any thread, when a grammar has been built.
    """

    def __init__(self, matchers: Matchers | None, vocab_size: int, eos: Iterable[int]):
        self.matchers = matchers
        self._eos_W = packed(eos, vocab_size)
        self._everything_W = everything(vocab_size)
        self.parallel = ParallelMatchers()
        self._slow = False  # the last masks delayed the whole step
        self.states: dict[Request, GrammarState] = {}
        # The masks of the last `start_masks`, by row
        self._masked: list[tuple[Request, GrammarState]] = []
        self._row: dict[Request, int] = {}
        self._bits_RW = np.zeros((0, 0), np.uint32)
        # Rows that allow a token and that no other option restricts
        self._sole_row: dict[Request, int] = {}
        # The choices of one request stand in their order
        self._building: dict[Request, Future[Matcher]] = {}
        self.on_built: Callable[[], None] = lambda: None

    @property
    def waiting(self) -> int:
        """How many choices wait for their grammar."""
        return len(self._building)

    @property
    def all_building(self) -> bool:
        """Whether choices wait, and none of their grammars is built yet."""
        return bool(self._building) and not any(build.done() for build in self._first().values())

    def validate_grammar(self, request: GenerateRequest) -> None:
        """Raises RequestError when the request wants structured output that cannot be had here."""
        if self.matchers is None and request.grammar is not None:
            raise RequestError("structured output needs a tokenizer", "structured_outputs")
        if request.params.structured_outputs is not None:
            raise RequestError(
                "structured output has to be compiled by the front end (grammar.checker)",
                "structured_outputs",
            )

    def start_build(self, request: Request, grammar: str) -> None:
        """Build the grammar of a new choice."""
        assert self.matchers is not None, "refused by validate_grammar"
        self._building[request] = future = self.matchers.start_matcher(grammar)
        future.add_done_callback(lambda _: self.on_built())

    def pop_built(self) -> list[tuple[Request, str | None]]:
        """Choices whose build has ended, each with None or the reason of its failure. Those of one
        request come in their order, since the first computes the prompt."""
        blocked: set[str] = set()
        done: list[Request] = []
        for request, future in self._building.items():
            if request.id not in blocked and future.done():
                done.append(request)
            else:
                blocked.add(request.id)
        return [(request, self._install(request, self._building.pop(request))) for request in done]

    def accept_step(
        self,
        emitters: Sequence[Request | None],
        tokens: Sequence[list[int]],
        unused: Container[Request],
    ) -> None:
        """Let the grammars follow the tokens that a step drew, but for those of `unused` choices;
        updates their states. Cuts the row of a choice behind the token after which its grammar is
        over."""
        if not self.states:
            return
        accepting = [
            (state, row)
            for request, row in zip(emitters, tokens, strict=True)
            if request is not None
            and row
            and (state := self.states.get(request)) is not None
            and request not in unused
        ]
        place = 0
        while accepting:
            self._accept_each([(state, row[place]) for state, row in accepting])
            place += 1
            accepting = [(state, row) for state, row in accepting if len(row) > place]
            for state, row in accepting:
                if state.over:
                    del row[place:]
            accepting = [(state, row) for state, row in accepting if len(row) > place]

    def _accept_each(self, accepting: Sequence[tuple[GrammarState, int]]) -> None:
        """Let each of these grammars follow a token."""
        if len(accepting) < SEQUENTIAL:
            for state, token in accepting:
                state.accept_token(token)
            return
        try:
            accepted = _contained(
                self.parallel.accept_each,
                [state.matcher for state, _ in accepting],
                [token for _, token in accepting],
            )
        except ConstraintError as error:  # which of them accepted a token is unknown
            for state, _ in accepting:
                state.error = str(error)
            return
        for (state, token), follows in zip(accepting, accepted, strict=True):
            if not follows:
                state.error = _failure(state.matcher, f"token {token} does not follow the grammar")
            state.count_token()

    def start_masks(self, requests: Sequence[Request]) -> None:
        """Start to compute the next masks of these choices, in a thread, until `wait_masks`.
        Meanwhile matchers may be used through this object only."""
        if not self.states:
            return
        self._masked = [
            (request, state)
            for request in requests
            if (state := self.states.get(request)) is not None
            and not state.ended
            and state.error is None
        ]
        self._row = {request: row for row, (request, _) in enumerate(self._masked)}
        if not self._slow:
            self.parallel.start_masks([state.matcher for _, state in self._masked])

    def wait_masks(self) -> list[Request]:
        """Wait for the masks. Returns the choices with one allowed token, which may have
        `forced_tokens`."""
        if not self.states or not self._masked:
            return []
        states = [state for _, state in self._masked]
        try:
            bits_RW = _contained(self._timed_masks if self._slow else self.parallel.wait_masks)
        except ConstraintError:
            self.parallel.settle()
            bits_RW = self._one_by_one()
        self._bits_RW = bits_RW[:, : self._eos_W.size]
        self._slow = self.parallel.took > min(TOGETHER_SECONDS, STEP_SECONDS * len(states))
        for state in states:
            if state.matcher.failed and state.error is None:
                state.error = _failure(state.matcher, "the grammar failed")
        top_R = self._mask_eos(
            [row for row, state in enumerate(states) if state.sole and state.delays_eos]
        )
        single_R = (self._bits_RW.sum(1, dtype=np.uint32) == top_R) & (
            top_R & (top_R - np.uint32(1)) == 0
        )
        single = np.flatnonzero(single_R).tolist()
        for row in single:
            self._fix_special_token(row)
        some_R = top_R.tolist()
        self._sole_row = {
            request: row
            for request, row in self._row.items()
            if (state := states[row]).sole
            and state.error is None
            and some_R[row]
            # Tokens that min_tokens forbids
            and not (state.min_left and nothing_but(self._bits_RW[row], request.stops))
        }
        return [self._masked[row][0] for row in single]

    def copy_masks(self, requests: Sequence[Request], allowed_RW: np.ndarray) -> bool:
        """Write the masks of all these choices. Writes nothing and returns False where another
        option restricts one of them."""
        rows = [self._sole_row.get(request) for request in requests]
        if None in rows:
            return False
        # Which copies whole rows
        np.take(
            self._bits_RW, np.array(rows, np.intp), axis=0, out=allowed_RW[: len(rows)], mode="clip"
        )
        return True

    def apply_mask(self, request: Request, allowed_W: np.ndarray) -> None:
        """Clear the bits of tokens that a choice's grammar does not allow next. Raises
        ConstraintError when the grammar has failed."""
        state = self.states[request]
        if state.error is not None:
            raise ConstraintError(state.error)
        np.bitwise_and(allowed_W, self._bits_RW[self._row[request]], out=allowed_W)
        if state.delays_eos:
            onward_W = allowed_W & ~self._eos_W
            if onward_W.any():
                allowed_W[:] = onward_W

    def forced_tokens(self, request: Request) -> list[int]:
        """The tokens that must come next, where they may be appended without a draw."""
        state = self.states.get(request)
        if state is None or not state.may_jump or state.error is not None:
            return []
        try:
            forced = _contained(state.matcher.forced_tokens)
        except ConstraintError:
            return []  # computing the mask reports it
        # A draw cannot give a stop token that min_tokens forbids
        early = (at for at, token in enumerate(forced[: state.min_left]) if token in request.stops)
        return forced[: next(early, len(forced))]

    def may_end(self, request: Request) -> bool:
        """Whether a choice's text is complete by its grammar."""
        self.parallel.settle()
        state = self.states.get(request)
        return state is not None and state.matcher.complete

    def release(self, request: Request) -> None:
        """Drop the grammar of a choice that has ended."""
        future = self._building.pop(request, None)
        if future is not None:
            future.cancel()
        state = self.states.pop(request, None)
        if state is not None and self.matchers is not None:
            self.parallel.settle()
            self.matchers.recycle(state.matcher)

    def _first(self) -> dict[str, Future[Matcher]]:
        """By request id, the build of its first waiting choice."""
        return {request.id: future for request, future in reversed(self._building.items())}

    def _install(self, request: Request, future: Future[Matcher]) -> str | None:
        """Give a choice its grammar; returns the reason where that failed."""
        params = request.params
        options = request.logits_options or LogitsOptions(self._everything_W)
        sole = not options.constraints and bool((options.allowed_W == self._everything_W).all())
        # Log-probabilities need draws
        no_logprobs = (
            params.logprobs is None and params.prompt_logprobs is None and params.best_of is None
        )
        try:
            matcher = _contained(future.result)
        except ConstraintError as error:
            return str(error)
        self.states[request] = GrammarState(
            matcher, params, sole, request.logits_options is None and no_logprobs
        )
        request.logits_options = replace(options, has_grammar=True)
        return None

    def _fix_special_token(self, row: int) -> None:
        """See `Matcher.fix_special_token`."""
        state = self._masked[row][1]
        try:
            _contained(state.matcher.fix_special_token, self._bits_RW[row])
        except ConstraintError as error:
            state.error = state.error or str(error)

    def _mask_eos(self, rows: list[int]) -> np.ndarray:
        """Clear end-of-sequence tokens in these rows of the masks, except where nothing else is
        allowed. Returns the largest word of each row, `[R]`."""
        words = np.flatnonzero(self._eos_W)
        cells = np.ix_(rows, words)
        before = self._bits_RW[cells]
        self._bits_RW[cells] = before & ~self._eos_W[words]
        top_R: np.ndarray = self._bits_RW.max(1)
        for at, row in enumerate(rows):
            if not top_R[row]:
                self._bits_RW[row, words] = before[at]
                top_R[row] = before[at].max(initial=0)
        return top_R

    def _timed_masks(self) -> np.ndarray:
        """The masks, with the time of each: grammars that take more than their share fail.

        Used after masks that delayed a step. On a busy machine no grammar may be at fault.
        """
        limit = fair_share(len(self._masked), os.cpu_count() or 1)
        bits_RW, costs = self.parallel.timed_masks([state.matcher for _, state in self._masked])
        self.parallel.took = 0.0
        for (_, state), cost in zip(self._masked, costs, strict=True):
            if cost > limit and state.error is None:
                state.error = (
                    "finding the tokens that may come next takes too long "
                    f"({cost * 1e3:.0f} ms, the limit is {limit * 1e3:.0f}); simplify the grammar"
                )
        return bits_RW

    def _one_by_one(self) -> np.ndarray:
        """The masks again, after computing them in parallel failed."""
        bits_RW = np.tile(self._everything_W, (len(self._masked), 1))
        for (_, state), bits_W in zip(self._masked, bits_RW, strict=True):
            try:
                _contained(state.matcher.apply_mask, bits_W)
            except ConstraintError as error:
                state.error = str(error)
        return bits_RW


def _failure(matcher: Matcher, otherwise: str) -> str:
    """Why a matcher failed, for the client."""
    try:
        _contained(matcher.raise_if_failed)
    except ConstraintError as error:
        return str(error)
    return f"structured output: {otherwise}"


def _contained[**P, T](work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`; whatever it raises becomes a ConstraintError. A panic of native code, which is
    no Exception, too."""
    try:
        return work(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit):
        raise
    except GrammarError as error:
        raise ConstraintError(f"structured output: {error}") from None
    except BaseException as error:
        logger.error("a grammar failed: %s: %s", type(error).__name__, error)
        raise ConstraintError("structured output: the grammar failed") from None
