"""From tokens to text, ends and counts. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.config import Resolved
from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.constraints.token_masks import HELD_BACK, NONE_ALLOWED, accept_tokens
from jaxllm.engine.output.counters import Counters
from jaxllm.engine.output.request_state import RequestState
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.messages import (
    TextDelta,
)

LOST_REQUEST = "the engine lost this request"


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

    def append_token(
        self, request: Request, token: int, now: float, logprobs: bytes | None
    ) -> TextDelta:
        """Append a token to a choice. Returns its delta, the last one where the token ends it."""
        request.output.append(token)
        request.first_token_at = request.first_token_at or now
        request.last_token_at = now
        self._counters.generation_tokens += 1
        self._scheduler.commit_tokens(request, 1)
        count, params, complete, text = len(request.output), request.params, False, ""
        if request.logits_options is not None:
            if (failure := accept_tokens(self._grammars, request, [token])) is not None:
                return self.fail_choice(request, failure, "structured_outputs", [token], logprobs)
            state = self._grammars.states.get(request)
            complete = state is not None and state.ended
        stopped = token in request.stops and count > params.min_tokens
        detokenizer = self._states[request.id].detokenizers[request.index]
        if detokenizer is not None:
            hidden = stopped or (complete and token in self._resolved.eos_ids)
            step = detokenizer.feed(
                [token] if not hidden or params.include_stop_str_in_output else []
            )
            text = step.text
            if step.stop is not None:
                return self.finish_choice(
                    request, [token], text, "stop", step.stop, logprobs=logprobs
                )
        if stopped or complete:
            named = stopped and (params.ignore_eos or token not in self._resolved.eos_ids)
            return self.finish_choice(
                request, [token], text, "stop", token if named else None, logprobs=logprobs
            )
        if count >= request.max_tokens:
            return self.finish_choice(request, [token], text, "length", None, logprobs=logprobs)
        return TextDelta(
            id=request.id,
            index=request.index,
            token_ids=[token],
            text=text,
            logprobs=logprobs,
            prompt_logprobs=None
            if params.prompt_logprobs is None
            else self._states[request.id].take_prompt_logprobs(request.index),
            num_cached_tokens=request.num_cached_tokens,
        )

    def finish_choice(
        self,
        request: Request,
        tokens: list[int],
        text: str,
        reason: str,
        stop: int | str | None,
        *,
        error: str | None = None,
        logprobs: bytes | None = None,
        error_param: str | None = None,
    ) -> TextDelta:
        """The last delta of a choice; frees its pages and slot."""
        state = self._states[request.id]
        self._scheduler.finish(request)
        self._grammars.release(request)
        detokenizer = state.detokenizers[request.index]
        if detokenizer is not None and not isinstance(stop, str):
            text += detokenizer.finish()
        if all(choice.status is Status.FINISHED for choice in state.choices):
            del self._states[request.id]
        return TextDelta(
            id=request.id,
            index=request.index,
            token_ids=tokens,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=state.take_prompt_logprobs(request.index),
            finish_reason=reason,
            stop_reason=stop,
            num_cached_tokens=request.num_cached_tokens,
            prefix_miss=request.prefix_miss,
            times=request.times,
            error=error,
            error_param=error_param,
        )

    def fail_choice(
        self,
        request: Request,
        error: str,
        error_param: str | None = None,
        tokens: Sequence[int] = (),
        logprobs: bytes | None = None,
    ) -> TextDelta:
        """End a choice with an error. `error_param` names the field of the request that caused it,
        if one did; `tokens` are its last ones."""
        return self.finish_choice(
            request,
            [*tokens],
            "",
            "error",
            None,
            error=error,
            logprobs=logprobs,
            error_param=error_param,
        )

    def end_without_token(self, request: Request, reason: str) -> TextDelta:
        """End a choice that has no next token: with "stop" where its grammar may end here, and
        min_tokens or a ban kept it from doing so, else with an error."""
        if self._grammars.may_end(request):
            return self.finish_choice(request, [], "", "stop", None)
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
