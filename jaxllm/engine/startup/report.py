"""What a person sees while the engine starts: phases with progress and times, and one table at the
end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

type Advance = Callable[[int, int], None]


class Report:
    """Silent base: records how long each phase took. `phase` yields `advance(done, total)`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[Advance]:
        """One named phase of the start."""
        start = time.perf_counter()
        with self._bar(name) as advance:
            yield advance
        self.seconds[name] = time.perf_counter() - start
        self.done(name, self.seconds[name])

    @contextmanager
    def _bar(self, name: str) -> Iterator[Advance]:
        yield lambda done, total: None

    def done(self, name: str, seconds: float) -> None:
        """A phase has ended."""

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        """The facts of the start."""


class ConsoleReport(Report):
    """Progress bars and the table on stderr; plain lines where stderr is no terminal. Phases may
    overlap in threads."""

    def __init__(self) -> None:
        super().__init__()
        self.console = Console(file=sys.stderr, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=self.console, transient=True)
        self._open = 0
        self._lock = threading.Lock()

    @contextmanager
    def _bar(self, name: str) -> Iterator[Advance]:
        if not self.console.is_terminal:
            self.console.print(f"{name} …")
            yield lambda done, total: None
            return
        task = self._progress.add_task(name, total=None)
        self._count(1)
        try:
            yield lambda done, total: self._progress.update(task, completed=done, total=total)
        finally:
            self._progress.remove_task(task)
            self._count(-1)

    def _count(self, change: int) -> None:
        """The bars are live while any phase is open."""
        with self._lock:
            self._open += change
            if self._open == 1 and change == 1:
                self._progress.start()
            elif self._open == 0:
                self._progress.stop()

    def done(self, name: str, seconds: float) -> None:
        self.console.print(f"{name} took {seconds:.2f} seconds")

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        table = Table(title=title, show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        self.console.print(table)
