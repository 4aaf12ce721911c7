"""Grammars in the engine: requests that wait for theirs, and the guide of each choice that runs. Imports no jax."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import replace

import numpy as np

from jaxllm.engine.request import Asked, GenerateRequest, Request, RequestError
from jaxllm.grammar.matcher import GrammarError, Matcher, Matchers
from jaxllm.sampling.bits import everything, packed
from jaxllm.sampling.constraint import ConstraintError
from jaxllm.sampling.options import SamplingParams

logger = logging.getLogger("jaxllm")


class Guide:
    """The `Constraint` of one choice with a grammar. After `advance` it says whether the text has `ended`, and whether it is `complete`, so
    that it may end."""

    def __init__(self, matcher: Matcher, params: SamplingParams, eos_W: np.ndarray):
        self.matcher = matcher
        self._eos_W, self._ignores, self._left = eos_W, params.ignore_eos, params.min_tokens

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return self.matcher.ended

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return self.matcher.complete

    def advance(self, token_ids: Sequence[int]) -> None:
        """See `Constraint`."""
        self._left -= len(token_ids)
        _contained(self.matcher.advance, token_ids)

    def mask(self, allowed_W: np.ndarray) -> None:
        """See `Constraint`. The end of the sequence is held back while other tokens may come, where the request asks for that."""
        _contained(self.matcher.mask, allowed_W)
        if self._ignores or self._left > 0:
            onward_W = allowed_W & ~self._eos_W
            if onward_W.any():
                allowed_W[:] = onward_W


class Guides:
    """Of one engine; not thread-safe. A grammar is built in a thread, and its request is scheduled when it is there.

    Without a tokenizer there are no `matchers`, and no request has a grammar.
    """

    def __init__(self, matchers: Matchers | None, vocab_size: int, eos: Iterable[int]):
        self._matchers, self._eos_W, self._everything_W = matchers, packed(eos, vocab_size), everything(vocab_size)
        self._waiting: dict[Request, Future[Matcher]] = {}  # the choices of one request in their order
        self.heard: Callable[[], None] = lambda: None  # called in any thread when a grammar has been built

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
            raise RequestError("structured output has to be compiled by the front end (grammar.checker)", "structured_outputs")

    def begin(self, request: Request, grammar: str) -> None:
        """Build the grammar of a new request."""
        assert self._matchers is not None, "refused by check"
        self._waiting[request] = future = self._matchers.begin(grammar)
        future.add_done_callback(lambda _: self.heard())

    def ready(self, idle: bool) -> list[tuple[Request, str | None]]:
        """Requests that have their guide now, and those that cannot have one, with the reason. An `idle` engine waits for the first.
        Choices of one request come in their order: the first is the one that computes the prompt."""
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

    def prepare(self, requests: Sequence[Request]) -> None:
        """Find the masks of all who have a guide at once, on all cores; each one's next `mask` uses it."""
        matchers = [request.guide.matcher for request in requests if request.guide is not None]
        if len(matchers) > 1 and self._matchers is not None:
            with suppress(ConstraintError):  # each is asked again alone
                _contained(self._matchers.prepare, matchers)

    def forced(self, request: Request) -> list[int]:
        """The tokens that must come next, when they are as good as drawn: nothing else decides about them, and nobody wants
        log-probabilities."""
        guide, asked, params = request.guide, request.asked, request.params
        if guide is None or asked is None or len(asked.constraints) > 1 or asked.allowed_W is not self._everything_W:
            return []
        if params.logprobs is not None or params.prompt_logprobs is not None or params.best_of is not None:
            return []
        try:
            return _contained(guide.matcher.forced)
        except ConstraintError:
            return []  # its mask will say so

    def release(self, request: Request) -> None:
        """It has ended."""
        future = self._waiting.pop(request, None)
        if future is not None:
            future.cancel()
        if request.guide is not None and self._matchers is not None:
            self._matchers.give_back(request.guide.matcher)
            request.guide = None

    def _first(self) -> dict[str, Future[Matcher]]:
        """What the first waiting choice of each request waits for."""
        return {request.id: future for request, future in reversed(self._waiting.items())}

    def _seat(self, request: Request, future: Future[Matcher]) -> str | None:
        """Give a request its guide, or say why it cannot have one."""
        try:
            guide = Guide(_contained(future.result), request.params, self._eos_W)
        except ConstraintError as error:
            return str(error)
        asked = request.asked or Asked(self._everything_W)
        request.guide, request.asked = guide, replace(asked, constraints=(*asked.constraints, guide))  # last: it knows whether it may end
        return None


def _contained[**P, T](work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` gives; whatever it raises is a ConstraintError, also a panic in native code, which is no Exception."""
    try:
        return work(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit):
        raise
    except GrammarError as error:
        raise ConstraintError(f"structured output: {error}") from None
    except BaseException as error:
        logger.error("a grammar failed: %s: %s", type(error).__name__, error)
        raise ConstraintError("structured output: the grammar failed") from None
