"""What a request's tokens come to: its output grows, its text is made, and it ends. Imports no jax."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.constraints.token_masks import HELD_BACK, NONE_ALLOWED, advance
from jaxllm.engine.output.counters import Counters
from jaxllm.engine.output.request_state import RequestState
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.messages import TextDelta


class OutputProcessor:
    """Of one engine, whose requests are in `live`, by id; the last end of a request's choices takes
    it out."""

    def __init__(
        self,
        live: dict[str, RequestState],
        scheduler: Scheduler,
        guides: Grammars,
        count: Counters,
        eos_ids: frozenset[int],
    ):
        self._live, self._scheduler, self._guides, self._count, self._eos_ids = (
            live,
            scheduler,
            guides,
            count,
            eos_ids,
        )

    def accept(self, request: Request, token: int, now: float, logprobs: bytes | None) -> TextDelta:
        """One new token of one request."""
        request.output.append(token)
        request.first_token_at = request.first_token_at or now
        request.last_token_at = now
        self._count.generation_tokens += 1
        self._scheduler.committed(request, 1)
        count, params, complete, text = len(request.output), request.params, False, ""
        if request.asked is not None:
            if (failed := advance(request, [token])) is not None:
                return self.fail(request, failed, "structured_outputs", [token], logprobs)
            complete = request.guide is not None and request.guide.ended
        stopped = token in request.stops and count > params.min_tokens
        detokenizer = self._live[request.id].detokenizers[request.index]
        if detokenizer is not None:
            hidden = stopped or (complete and token in self._eos_ids)
            step = detokenizer.feed(
                [token] if not hidden or params.include_stop_str_in_output else []
            )
            text = step.text
            if step.stop is not None:
                return self.finish(request, [token], text, "stop", step.stop, logprobs=logprobs)
        if stopped or complete:
            named = stopped and (params.ignore_eos or token not in self._eos_ids)
            return self.finish(
                request, [token], text, "stop", token if named else None, logprobs=logprobs
            )
        if count >= request.max_tokens:
            return self.finish(request, [token], text, "length", None, logprobs=logprobs)
        return TextDelta(
            id=request.id,
            index=request.index,
            token_ids=[token],
            text=text,
            logprobs=logprobs,
            prompt_logprobs=None
            if params.prompt_logprobs is None
            else self._live[request.id].scores_for(request.index),
            num_cached_tokens=request.num_cached_tokens,
        )

    def finish(
        self,
        request: Request,
        tokens: list[int],
        text: str,
        reason: str,
        stop: int | str | None,
        error: str | None = None,
        logprobs: bytes | None = None,
        error_param: str | None = None,
    ) -> TextDelta:
        """The last delta of a choice; its pages and slot are free afterwards."""
        live = self._live[request.id]
        self._scheduler.finish(request)
        self._guides.release(request)
        detokenizer = live.detokenizers[request.index]
        if detokenizer is not None and not isinstance(stop, str):
            text += detokenizer.finish()
        if all(choice.status is Status.FINISHED for choice in live.choices):
            del self._live[request.id]
        return TextDelta(
            id=request.id,
            index=request.index,
            token_ids=tokens,
            text=text,
            logprobs=logprobs,
            prompt_logprobs=live.scores_for(request.index),
            finish_reason=reason,
            stop_reason=stop,
            num_cached_tokens=request.num_cached_tokens,
            times=request.times,
            error=error,
            error_param=error_param,
        )

    def fail(
        self,
        request: Request,
        why: str,
        error_param: str | None = None,
        tokens: Sequence[int] = (),
        logprobs: bytes | None = None,
    ) -> TextDelta:
        """End a choice with an error, which the field `error_param` of its request made, if one
        did; `tokens` are the last that it has said."""
        return self.finish(request, [*tokens], "", "error", None, why, logprobs, error_param)

    def give_up(self, request: Request, why: str) -> TextDelta:
        """End a choice that has no next token: well where its grammar may end here, and min_tokens
        or a ban held the end back."""
        if self._guides.complete(request):
            return self.finish(request, [], "", "stop", None)
        field = {NONE_ALLOWED: "allowed_token_ids", HELD_BACK: "min_tokens"}.get(why)
        return self.fail(request, why, field if request.guide is None else "structured_outputs")
