"""What the start-up table says."""

from __future__ import annotations

from jaxllm.engine.report import Report


class Kept(Report):
    """Keeps the table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, str] = {}

    def table(self, title: str, rows: list[tuple[str, str]]) -> None:
        assert len(dict(rows)) == len(rows), "a row is there twice"
        self.rows = dict(rows)
