"""From tokens to text, ends and counts. Imports no jax."""

from __future__ import annotations

from typing import NamedTuple

from jaxllm.config import Resolved
from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.constraints.token_masks import HELD_BACK, NONE_ALLOWED, accept_token
from jaxllm.engine.output.counters import Counters
from jaxllm.engine.output.request_state import RequestState
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.logprobs import first_rows
from jaxllm.messages import TextDelta

LOST_REQUEST = "the engine lost this request"


class Ending(NamedTuple):
    """How a choice ends.

    Attributes:
        reason: its finish_reason.
        stop: the stop token or the stop string, where the client is told of one.
        hides_token: whether the last token is no part of the text.
        error: what went wrong, for the client.
        error_param: the field of the request that caused it, if one did.
    """

    reason: str
    stop: int | str | None = None
    error: str | None = None
    error_param: str | None = None
    hides_token: bool = False


class OutputProcessor:
    """Makes the deltas of an engine's requests.

    `states` holds the running requests by id. A request leaves it when its last choice ends.
    """

    def __init__(
        self,
        states: dict[str, RequestState],
        scheduler: Scheduler,
        grammars: Grammars,
        counters: Counters,
        resolved: Resolved,
    ):
        self._states = states
        self._scheduler = scheduler
        self._grammars = grammars
        self._counters = counters
        self._resolved = resolved

    def append_tokens(
        self, request: Request, tokens: list[int], now: float, logprobs: bytes | None
    ) -> TextDelta:
        """Append tokens, at least one, to a choice, up to the first that ends it. Returns their
        delta, the last one where they end it. If the choice has a grammar, that has followed all of
        them. `now` is Unix time in seconds; `logprobs` has a packed row for each token."""
        state = self._states[request.id]
        end: Ending | None = None
        left = request.max_tokens - len(request.output)
        count = 0
        # Whatever a row does not need is behind this condition: a step has hundreds of rows
        for token in tokens:
            count += 1
            if token in request.stops or count >= left or request.logits_options is not None:
                end = self._end_of(request, token, count, is_last=count == len(tokens))
                if end is not None:
                    break
        text = ""
        detokenizer = state.detokenizers[request.index]
        if detokenizer is not None:
            shown = tokens
            if end is not None:
                shown = tokens[: count - end.hides_token]
            step = detokenizer.feed(shown)
            text = step.text
            if step.stop is not None:
                end = Ending("stop", step.stop)
                count = step.count
        if end is not None:
            logprobs = first_rows(logprobs, count, len(tokens))
            tokens = tokens[:count]
        request.output += tokens
        if not request.first_token_at:
            request.first_token_at = now
        request.last_token_at = now
        self._counters.generation_tokens += count
        self._scheduler.commit_tokens(request, count)
        if end is not None:
            return self.finish_choice(request, end, tokens, text, logprobs)
        delta = TextDelta(
            id=request.id,
            index=request.index,
            token_ids=tokens,
            text=text,
            logprobs=logprobs,
            num_cached_tokens=request.num_cached_tokens,
        )
        if request.params.prompt_logprobs is not None:
            delta.prompt_logprobs = state.take_prompt_logprobs(request.index)
        return delta

    def _end_of(self, request: Request, token: int, count: int, *, is_last: bool) -> Ending | None:
        """How a token, the `count`-th of those that are being appended to a choice, ends it; None
        where it goes on. Its constraints follow the token. Its grammar is ahead: what that
        knows is of the last token."""
        complete = False
        if request.logits_options is not None:
            failure = accept_token(request.logits_options.constraints, token)
            grammar = None
            if is_last:
                grammar = self._grammars.states.get(request)
            if failure is None and grammar is not None:
                failure = grammar.error
            if failure is not None:
                return Ending(
                    "error", error=failure, error_param="structured_outputs", hides_token=True
                )
            complete = grammar is not None and grammar.ended
        params = request.params
        length = len(request.output) + count
        stopped = token in request.stops and length > params.min_tokens
        if stopped or complete:
            is_eos = token in self._resolved.eos_ids
            named = stopped and (params.ignore_eos or not is_eos)
            hides_token = (stopped or is_eos) and not params.include_stop_str_in_output
            return Ending("stop", token if named else None, hides_token=hides_token)
        if length >= request.max_tokens:
            return Ending("length")
        return None

    def finish_choice(
        self,
        request: Request,
        end: Ending,
        tokens: list[int] | None = None,
        text: str = "",
        logprobs: bytes | None = None,
    ) -> TextDelta:
        """The last delta of a choice, with its last tokens and their text; frees its pages and
        slot."""
        state = self._states[request.id]
        self._scheduler.finish(request)
        self._grammars.release(request)
        detokenizer = state.detokenizers[request.index]
        if detokenizer is not None and not isinstance(end.stop, str):
            text += detokenizer.finish()
        if all(choice.status is Status.FINISHED for choice in state.choices):
            del self._states[request.id]
        return TextDelta(
            id=request.id,
            index=request.index,
            token_ids=[] if tokens is None else tokens,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=state.take_prompt_logprobs(request.index),
            finish_reason=end.reason,
            stop_reason=end.stop,
            num_cached_tokens=request.num_cached_tokens,
            prefix_miss=request.prefix_miss,
            times=request.times,
            error=end.error,
            error_param=end.error_param,
        )

    def fail_choice(
        self, request: Request, error: str, error_param: str | None = None
    ) -> TextDelta:
        """End a choice with an error. `error_param` names the field of the request that caused it,
        if one did."""
        return self.finish_choice(request, Ending("error", None, error, error_param))

    def end_without_token(self, request: Request, reason: str) -> TextDelta:
        """End a choice that has no next token: with "stop" where its grammar may end here, and
        min_tokens or a ban kept it from doing so, else with an error."""
        if self._grammars.may_end(request):
            return self.finish_choice(request, Ending("stop"))
        param = {NONE_ALLOWED: "allowed_token_ids", HELD_BACK: "min_tokens"}.get(reason)
        if request in self._grammars.states:
            param = "structured_outputs"
        return self.fail_choice(request, reason, param)


def lost_choice(request_id: str, index: int) -> TextDelta:
    """The end of a choice that the engine has lost."""
    return TextDelta(
        id=request_id,
        index=index,
        token_ids=[],
        text="",
        finish_reason="error",
        error=LOST_REQUEST,
    )


def answer(request: Request) -> TextDelta:
    """The only delta of a request that goes on without anybody who waits for its tokens."""
    return TextDelta(
        id=request.id,
        index=request.index,
        token_ids=[],
        text="",
        finish_reason="length",
        num_cached_tokens=request.num_cached_tokens,
        prefix_miss=request.prefix_miss,
        times=request.times,
    )
