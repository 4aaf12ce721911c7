"""Host memory of the device without arithmetic, and a forecast that lets it be needed."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxllm.engine.scheduling.admission import AdmissionEstimator
from jaxllm.engine.scheduling.plan import Moves, Traffic


class Optimist(AdmissionEstimator):
    """Admits whatever fits now, so that much is preempted."""

    def worthwhile_steps(self, tokens: int, rows: int, step_cost: int) -> float:
        return 0.0


@dataclass
class FakeHost:
    """Contents of pages by place. What is fetched by one plan and put by the next may be saved over
    meanwhile."""

    pages: dict[int, list[int | None]] = field(default_factory=dict)
    fetched: dict[int, list[int | None]] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)

    def move(
        self, kv: dict[tuple[int, int], int], page_size: int, moves: Moves, frozen: set[int]
    ) -> None:
        """What a plan moves. Pages of `frozen` must not be written."""
        for page, place in moves.saves:
            self.pages[place] = [kv.get((page, offset)) for offset in range(page_size)]
        fetched = {place: self.pages[place] for place in moves.fetches}
        assert not {page for _, page in moves.puts} & frozen, (
            "a page that others may read is put over"
        )
        assert len({page for _, page in moves.puts}) == len(moves.puts), "two pages are put to one"
        for place, page in moves.puts:
            for offset, digest in enumerate((self.fetched | fetched)[place]):
                assert digest is not None, "a page that was never written is put into the pool"
                kv[page, offset] = digest
        if moves.fetches or moves.puts:
            self.fetched = fetched
        self.traffic.saved += len(moves.saves)
        self.traffic.loaded += len(moves.puts)
