"""Draws that depend on the tokens before them: of choices with a grammar, or whose options count
tokens on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import NamedTuple

from jaxllm.background.thread import BackgroundThread
from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.constraints.token_masks import token_bitmask
from jaxllm.engine.output.output_processor import OutputProcessor
from jaxllm.engine.runtime.runner import Collected, Forwarded, Runner, UnusedDraw, UnusedDraws
from jaxllm.engine.scheduling.plan import Plan
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.messages import TextDelta

MIN_JUMP = 4  # tokens that a grammar forces; fewer are not worth a chunk


def is_constrained(plan: Plan) -> bool:
    """Whether a draw of the step depends on tokens of the steps in flight."""
    return any(
        request.logits_options is not None and request.logits_options.on_host
        for request in plan.processed_requests
    )


class Restricted(NamedTuple):
    """What the host knows before a draw.

    Attributes:
        deltas: of the steps before, and of forced tokens.
        unused: requests whose draw will not be used.
    """

    deltas: list[TextDelta]
    unused: UnusedDraws


class ConstrainedDraws:
    """Collects the steps in flight beside the forward of the next one, and commits them before its
    draw."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        grammars: Grammars,
        output: OutputProcessor,
        commit: Callable[[Collected], list[TextDelta]],
    ):
        self._runner = runner
        self._scheduler = scheduler
        self._grammars = grammars
        self._output = output
        self._commit = commit
        self._background = BackgroundThread("forward")

    def forward(
        self, plan: Plan, collect: Callable[[], list[Collected]]
    ) -> tuple[Forwarded, list[Collected]]:
        """Launch a forward in a thread, which takes a millisecond. Beside it, collect the steps in
        flight and start the token masks."""

        def launch() -> Forwarded:
            with self._runner.compiles:
                return self._runner.forward(plan)

        launching = self._background.submit(launch)
        try:
            collected = collect()
            ended = {request for step in collected for request in dead_ends(step.unused)}
            going_on = [request for request in plan.processed_requests if request not in ended]
            self._grammars.start_masks(going_on)
        finally:
            wait([launching])
        return launching.result(), collected

    def restrict(self, plan: Plan, before: Sequence[Collected]) -> Restricted:
        """Commit the steps before a draw, then set the masks of the requests that draw."""
        # Texts are made while the masks are computed
        deltas = [delta for step in before for delta in self._commit(step)]
        unused: dict[Request, UnusedDraw] = {
            request: UnusedDraw()
            for request in self._grammars.wait_masks()
            if self._jump(request, deltas)
        }
        restricted = [
            request
            for request in plan.processed_requests
            if request.status is Status.RUNNING
            and request not in unused
            and request.logits_options is not None
            and request.logits_options.restricted
        ]
        masks = partial(token_bitmask, self._grammars)
        for request, reason in self._runner.apply_token_bitmask(restricted, masks):
            unused[request] = UnusedDraw(dead_end=reason)
        return Restricted(deltas, unused)

    def settle(self) -> None:
        """Wait for a forward that is being launched: it uses buffers of the device."""
        self._background.settle()

    def _jump(self, request: Request, deltas: list[TextDelta]) -> bool:
        """Append the tokens that the request's grammar forces, without a draw. False when there are
        too few."""
        capacity = self._scheduler.jump_capacity(request)
        forced = self._grammars.forced_tokens(request)[:capacity] if capacity >= MIN_JUMP else []
        state = self._grammars.states.get(request)
        if state is None or len(forced) < MIN_JUMP:
            return False
        forced = state.accept_tokens(forced)
        deltas.append(self._output.append_tokens(request, forced, time.time(), None))
        if request.status is not Status.FINISHED:
            self._scheduler.jump(request)
        return True


def dead_ends(unused: UnusedDraws) -> list[Request]:
    """The requests that end with a step, because they have no next token."""
    return [request for request, why in unused.items() if why.dead_end is not None]
