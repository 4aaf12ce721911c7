"""The tokens of a collected step reach their requests."""

from __future__ import annotations

import time

from jaxllm.engine.constraints.token_masks import NO_TOKEN
from jaxllm.engine.output.output_processor import OutputProcessor
from jaxllm.engine.output.running_requests import RunningRequests
from jaxllm.engine.runtime.runner import Collected
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.transfer.exports import PageExports
from jaxllm.messages import TextDelta
from jaxllm.sampling.choose import LOGPROBS


class Commit:
    """Appends the tokens of steps to their requests, and ends those that are complete."""

    def __init__(
        self,
        requests: RunningRequests,
        scheduler: Scheduler,
        output: OutputProcessor,
        exports: PageExports,
    ):
        self._requests = requests
        self._scheduler = scheduler
        self._output = output
        self._exports = exports

    def __call__(self, step: Collected) -> list[TextDelta]:
        """The deltas of one step."""
        deltas: list[TextDelta] = []
        now = time.time()
        plan = step.plan
        self._exports.export(plan.chunks)
        for span, scores in step.scores:
            if span.request.status is not Status.FINISHED:
                self._requests.states[span.request.id].add_prompt_logprobs(span, scores)
        if plan.drafts:
            self._scheduler.judge_drafts(plan, step.tokens, step.unused)
        # Names of this function's own are found faster, and a step has hundreds of rows
        append_tokens = self._output.append_tokens
        finished = Status.FINISHED
        step_logprobs = step.logprobs
        unused = step.unused
        rows = range(len(step.tokens))
        for row, request, tokens in zip(rows, plan.emitters, step.tokens, strict=True):
            if request is None or request.status is finished:
                continue
            if unused and request in unused:
                dead_end = unused[request].dead_end
                if dead_end is not None:
                    deltas.append(self._output.end_without_token(request, dead_end))
                continue
            if not tokens:
                deltas += self._commit_failure(step, row, request)
                continue
            if request.is_beam:
                deltas += self._commit_beam(step, row, request, now)
                continue
            logprobs = None
            if step_logprobs is not None and request.needs & LOGPROBS:
                logprobs = step_logprobs.row(row, request.top, len(tokens))
            deltas.append(append_tokens(request, tokens, now, logprobs))
        return deltas

    def _commit_failure(self, step: Collected, row: int, request: Request) -> list[TextDelta]:
        """End a request that should have got a token, and has none."""
        # Logits that a host function changed tell nothing about the KV
        if row not in step.failures:
            self._scheduler.invalidate(request)
            self._exports.forget(request.hashes)
        if request.is_beam:
            return self._requests.beams.stop_search(request.id, "error", NO_TOKEN)
        return [self._output.fail_choice(request, step.failures.get(row, NO_TOKEN))]

    def _commit_beam(
        self, step: Collected, row: int, request: Request, now: float
    ) -> list[TextDelta]:
        """Give a beam's most likely next tokens to its search."""
        beams = self._requests.beams
        if step.logprobs is None:
            return beams.stop_search(request.id, "error", NO_TOKEN)
        return beams.add_top_tokens(request, step.logprobs.top(row, request.top), now)
