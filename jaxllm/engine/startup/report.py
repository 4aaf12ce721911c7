"""Progress of a start for its operator: phases with times, then one table of decisions."""

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
    """A silent report, for subclasses to show. Phases may overlap in threads.

    Attributes:
        seconds: Duration of each finished phase, by name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._finishing = threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[Advance]:
        """Time one phase of the start; yields `advance(done, total)`. A phase that raises is not
        reported."""
        start = time.perf_counter()
        with self._bar(name) as advance:
            yield advance
        with self._finishing:
            self.seconds[name] = time.perf_counter() - start
            self.phase_finished(name, self.seconds[name])

    @contextmanager
    def _bar(self, name: str) -> Iterator[Advance]:
        yield lambda done, total: None

    def phase_finished(self, name: str, seconds: float) -> None:
        """Called once a phase, by the phase's thread, by one thread at a time."""

    def show_table(self, title: str, rows: list[tuple[str, str]]) -> None:
        """Called once, with the decisions and measurements of the start."""


class ConsoleReport(Report):
    """Progress bars and the table on stderr; plain lines where stderr is no terminal."""

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
        self._opening = threading.Lock()

    @contextmanager
    def _bar(self, name: str) -> Iterator[Advance]:
        if not self.console.is_terminal:
            self.console.print(f"{name} …")
            yield lambda done, total: None
            return
        task = self._progress.add_task(name, total=None)
        self._count_open(1)
        try:
            yield lambda done, total: self._progress.update(task, completed=done, total=total)
        finally:
            self._progress.remove_task(task)
            self._count_open(-1)

    def _count_open(self, change: int) -> None:
        """Show the bars while any phase is open."""
        with self._opening:
            self._open += change
            if self._open == 1 and change == 1:
                self._progress.start()
            elif self._open == 0:
                self._progress.stop()

    def phase_finished(self, name: str, seconds: float) -> None:
        self.console.print(f"{name} took {seconds:.2f} seconds")

    def show_table(self, title: str, rows: list[tuple[str, str]]) -> None:
        table = Table(title=title, show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        self.console.print(table)
