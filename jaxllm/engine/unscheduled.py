"""Choices that cannot be scheduled yet: their pages are on their way from another engine, or their
grammar is being built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.scheduling.request import Request, Status
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.transfer.transfer import PageTransfer, check_without_transfer
from jaxllm.messages import GenerateRequest


class Unscheduled:
    """Schedules choices as soon as nothing is missing: pages first, then grammars."""

    def __init__(self, scheduler: Scheduler, grammars: Grammars, transfer: PageTransfer | None):
        self._scheduler, self._grammars, self._transfer = scheduler, grammars, transfer
        self._fetcher = None if transfer is None else transfer.fetcher

    @property
    def waiting(self) -> int:
        """How many choices wait."""
        return self._grammars.waiting + (0 if self._fetcher is None else self._fetcher.waiting)

    @property
    def unsettled(self) -> bool:
        """Whether choices wait, or pages are on their way for some that were aborted."""
        return bool(self.waiting or (self._fetcher is not None and self._fetcher.pending))

    @property
    def blocked(self) -> bool:
        """Whether choices wait, and none of them can go on yet."""
        fetches = () if self._fetcher is None else self._fetcher.pending
        if any(fetch.done() for fetch in fetches):
            return False
        return bool(self.waiting) and (not self._grammars.waiting or self._grammars.all_building)

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Call `callback`, in any thread, whenever a choice can go on."""
        self._grammars.on_built = callback
        if self._fetcher is not None:
            self._fetcher.on_arrived = callback

    def validate(self, request: GenerateRequest) -> None:
        """Raises RequestError when the request wants transfers that are not made here."""
        if self._transfer is None:
            check_without_transfer(request)
        else:
            self._transfer.address(request)

    def add(self, choices: Sequence[Request], request: GenerateRequest) -> None:
        """Take the choices of a new, validated request."""
        address = None if self._transfer is None else self._transfer.address(request)
        fetches = (
            self._fetcher is not None
            and address is not None
            and not choices[0].score_end  # the prompt must be computed
            and not request.params.use_beam_search
            and self._fetcher.start(choices, request.grammar, address)
        )
        if not fetches:
            self._go_on(choices, request.grammar)

    def schedule_ready(self, block: bool) -> list[tuple[Request, str]]:
        """Schedule the choices that lack nothing any more; with `block`, wait until there is one.
        Returns those whose grammar cannot be had, with the reason."""
        fetcher = self._fetcher
        if fetcher is not None:
            if block and fetcher.pending:
                futures: list[Future[Any]] = [*fetcher.pending, *self._grammars.builds]
                wait(futures, return_when=FIRST_COMPLETED)
                block = False
            for choices, grammar in fetcher.pop_arrived():
                self._go_on(choices, grammar)
        failed = []
        for request, error in self._grammars.pop_built(block):
            if error is None:
                self._scheduler.add(request)
            else:
                failed.append((request, error))
        return failed

    def forget_all(self) -> None:
        """Forget the choices that wait for pages, and all that the scheduler has: the room for what
        is on its way is the scheduler's."""
        self._scheduler.reset()
        if self._fetcher is not None:
            self._fetcher.clear()

    def _go_on(self, choices: Sequence[Request], grammar: str | None) -> None:
        """Schedule choices that have their pages, or build their grammar."""
        for choice in choices:
            if choice.status is Status.FINISHED:
                continue
            if grammar is None:
                self._scheduler.add(choice)
            else:
                self._grammars.start_build(choice, grammar)
