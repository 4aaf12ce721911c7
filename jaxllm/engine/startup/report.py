"""Progress of a start for its operator: phases with times, and a table."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import rich.progress
from rich.console import Console
from rich.table import Table

from jaxllm.engine.runtime.lattice import Progress

logger = logging.getLogger("jaxllm.engine")

type Rows = list[tuple[str, str]]


class Report:
    """A silent report, for subclasses to show. Phases may overlap in threads.

    Attributes:
        seconds: Duration of each finished phase, by name.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[Progress]:
        """Time one phase of the start; yields `progress(done, total)`. A phase that raises is not
        reported."""
        start = time.perf_counter()
        with self._bar(name) as shown:

            def progress(done: int, total: int) -> None:
                shown(done, total)
                self.phase_moved(name, done, total)

            self.phase_moved(name, 0, 0)
            yield progress
        with self._lock:
            self.seconds[name] = time.perf_counter() - start
            self.phase_finished(name, self.seconds[name])

    @contextmanager
    def _bar(self, name: str) -> Iterator[Progress]:
        yield lambda done, total: None

    def phase_moved(self, name: str, done: int, total: int) -> None:
        """Called when a phase begins, with zeros, and whenever it is further, by any thread."""

    def phase_finished(self, name: str, seconds: float) -> None:
        """Called once a phase, by the phase's thread, by one thread at a time."""

    def show_table(self, title: str, rows: Rows) -> None:
        """Called once, with the decisions and measurements of the start."""


class ConsoleReport(Report):
    """Progress bars and the table on stderr; plain lines where stderr is no terminal. What cannot
    be written, as on a full disk, is not shown."""

    def __init__(self) -> None:
        super().__init__()
        self.console = Console(file=sys.stderr, highlight=False)
        columns = (
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.percentage:>3.0f}%"),
            rich.progress.TimeElapsedColumn(),
        )
        self._bars = rich.progress.Progress(*columns, console=self.console, transient=True)

    @contextmanager
    def _bar(self, name: str) -> Iterator[Progress]:
        if not self.console.is_terminal:
            self._print(f"{name} …")
            yield lambda done, total: None
            return
        with self._lock:
            task = self._bars.add_task(name, total=None)
            self._bars.start()  # changes nothing where bars are shown already
        try:
            yield lambda done, total: self._bars.update(task, completed=done, total=total)
        finally:
            with self._lock:
                self._bars.remove_task(task)
                if not self._bars.tasks:
                    self._bars.stop()

    def phase_finished(self, name: str, seconds: float) -> None:
        self._print(f"{name} took {seconds:.2f} seconds")

    def show_table(self, title: str, rows: Rows) -> None:
        table = Table(title=title, show_header=False)
        for name, value in rows:
            table.add_row(name, value)
        self._print(table)

    def _print(self, shown: str | Table) -> None:
        with suppress(OSError):
            self.console.print(shown)


class LogReport(Report):
    """Phases and the table as log lines, for logs that machines read."""

    def phase_finished(self, name: str, seconds: float) -> None:
        logger.info("%s took %.2f seconds", name, seconds)

    def show_table(self, title: str, rows: Rows) -> None:
        for name, value in rows:
            logger.info("%s: %s", name, value)
