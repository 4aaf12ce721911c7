"""What choices lack when they come: a grammar that is being built, before which none is scheduled,
and pages of another engine, for which they wait where they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event

from jaxllm.engine.constraints.grammars import Grammars
from jaxllm.engine.scheduling.request import Request
from jaxllm.engine.scheduling.scheduler import Scheduler
from jaxllm.engine.transfer.transfer import NoTransfer, PageTransfer
from jaxllm.messages import GenerateRequest, TextDelta

# Ends a choice: its request, the reason, and the field that is at fault
type Fail = Callable[[Request, str, str], TextDelta]


class Pending:
    """Schedules choices as soon as their grammar is built, and starts what brings their pages.
    `fail` ends those whose grammar cannot be had."""

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: Grammars,
        transfer: PageTransfer | NoTransfer,
        fail: Fail,
    ):
        self._scheduler = scheduler
        self._grammars = grammars
        self._transfer = transfer
        self._fail = fail
        self._exports = transfer.exports
        self._fetcher = transfer.fetcher
        self._news = Event()  # set when a choice may go on
        self.on_ready(lambda: None)

    @property
    def waiting(self) -> int:
        """How many choices are not scheduled."""
        return self._grammars.waiting

    @property
    def unsettled(self) -> bool:
        """Whether grammars are being built, or pages are on their way."""
        return bool(self.waiting or (self._fetcher is not None and self._fetcher.pending))

    @property
    def blocked(self) -> bool:
        """Whether grammars or pages are awaited, and none has come."""
        if self._fetcher is not None and self._fetcher.has_news:
            return False
        return self.unsettled and (not self._grammars.waiting or self._grammars.all_building)

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Call `callback`, in any thread, whenever a choice may go on."""

        def tell() -> None:
            self._news.set()
            callback()

        self._grammars.on_built = tell
        if self._fetcher is not None:
            self._fetcher.on_arrived = tell

    def validate(self, request: GenerateRequest) -> None:
        """Raises RequestError when the request wants transfers that are not made here."""
        self._transfer.address(request)

    def add(self, choices: Sequence[Request], request: GenerateRequest) -> None:
        """Take the choices of a new, validated request."""
        address = self._transfer.address(request)
        if (
            self._fetcher is not None
            and address is not None
            and not choices[0].score_end  # the prompt must be computed
            and not request.params.use_beam_search
        ):
            self._fetcher.start(choices, address)
        if choices[0].shares_pages:
            self._exports.announce(choices[0])
        for choice in choices:
            if request.grammar is None:
                self._scheduler.add(choice)
            else:
                self._grammars.start_build(choice, request.grammar)

    def schedule_ready(self, block: bool) -> list[TextDelta]:
        """Schedule the choices that lack no grammar any more, and let host memory have the pages
        that came; with `block`, wait until there is something of either. Returns the ends of the
        choices whose grammar cannot be had."""
        if block:
            self._news.wait()
        self._news.clear()  # before looking: what comes meanwhile counts the next time
        if self._fetcher is not None:
            self._fetcher.collect()
        ends = []
        for request, error in self._grammars.pop_built():
            if error is None:
                self._scheduler.add(request)
            else:
                ends.append(self._fail(request, error, "structured_outputs"))
        return ends

    def forget_all(self) -> None:
        """Forget all that the scheduler has, and the pages on their way, whose room that was."""
        self._scheduler.reset()
        if self._fetcher is not None:
            self._fetcher.clear()
        self._exports.clear()
