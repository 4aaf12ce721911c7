"""A device without arithmetic, for tests of the scheduler.

Instead of keys and values a page holds, for every token, a digest of the whole prefix up to it.
Each row checks every digest that attention would read, so one wrong, stale or unwritten page shows
itself; layers with a window read what they see and what lies in the same tile. The next token is a
function of the digest and the request's seed, so a request's output is known beforehand, whatever
it shared a batch with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxllm.cache.pool import Lifetime
from jaxllm.engine.output.beam_search import BeamSearch, Finished, Rules
from jaxllm.engine.scheduling.plan import Plan
from jaxllm.engine.scheduling.request import Request
from tests.engine.fake_host import FakeHost

EOS = 0
VOCAB = 31


def digests(tokens: list[int]) -> list[int]:
    """Per token, the digest of the prefix that ends with it."""
    out, digest = [], 1
    for token in tokens:
        digest = hash((digest, token))
        out.append(digest)
    return out


def draw(digest: int, seed: int) -> int:
    """The token after a prefix; requests with different seeds draw different ones."""
    return (hash((digest, seed)) if seed else digest) % VOCAB


def generate(prompt: list[int], max_tokens: int, stop_at: int | None, seed: int = 0) -> list[int]:
    """What an undisturbed request outputs: until EOS, `max_tokens`, or the host's own stop after
    `stop_at` tokens."""
    output: list[int] = []
    while len(output) < min(max_tokens, stop_at or max_tokens) and (
        not output or output[-1] != EOS
    ):
        output.append(draw(digests(prompt + output)[-1], seed))
    return output


def likely(tokens: list[int], count: int) -> list[tuple[int, float]]:
    """The most likely tokens after a sequence, with log-probabilities."""
    digest = digests(tokens)[-1]
    step, slope = 1 + digest // VOCAB % (VOCAB - 1), 0.2 + digest // 997 % 5
    return [((digest + i * step) % VOCAB, -0.1 - i * slope) for i in range(min(count, VOCAB))]


def search_alone(prompt: list[int], rules: Rules) -> list[Finished]:
    """What an undisturbed search finds."""
    search = BeamSearch(rules)
    while search.step([likely(prompt + beam.tokens, search.needed) for beam in search.beams]):
        pass
    return search.finished


@dataclass
class Slot:
    """What the device knows of the request in one slot."""

    request: Request
    tokens: list[int]
    tables: list[list[int]]
    alive: bool
    remaining: int


@dataclass
class FakeDevice:
    """Runs plans in the order of launch."""

    page_size: int
    kinds: list[Lifetime]
    kv: list[dict[tuple[int, int], int]] = field(init=False)  # of each kind of layers
    slots: dict[int, Slot] = field(default_factory=dict)
    host: FakeHost = field(default_factory=FakeHost)

    def __post_init__(self) -> None:
        self.kv = [{} for _ in self.kinds]

    def run(self, plan: Plan, frozen: set[tuple[int, int]]) -> list[int]:
        """Tokens per row of the plan (decodes, then chunks), −1 where a row has stopped or its
        prompt goes on. Pages of `frozen` (kind, page) must not be written."""
        copied = {(kind, target) for _, target, kind in plan.copies}
        self._copy(plan.copies)
        assert not copied & frozen, "a page that others may read is copied over"
        writes: list[dict[tuple[int, int], int]] = [{} for _ in self.kinds]
        reads: list[tuple[Slot, int, int]] = []
        entries = [(write.slot, write.group) for write in plan.table_writes]
        assert len(set(entries)) == len(entries) and {slot for slot, _ in entries} <= set(
            plan.slots
        )
        for index, at, page, group in plan.table_writes:
            self.slots[index].tables[group][at:] = [page]
        for request, position in zip(plan.decodes, plan.positions, strict=True):
            slot = self.slots[request.slot]
            assert slot.request is request
            assert slot.tables == [table.pages for table in request.tables], "a page is missing"
            if slot.alive:
                assert position == len(slot.tokens) - 1
                self._write(slot, position, position + 1, writes)
                reads.append((slot, position, position + 1))
        for chunk in plan.chunks:
            request, end = chunk.request, chunk.start + chunk.length
            tables = [list(table.pages) for table in request.tables]
            slot = Slot(
                request,
                request.tokens(0, end),
                tables,
                chunk.final,
                request.max_tokens - len(request.output),
            )
            self.slots[request.slot] = slot
            self._write(slot, max(chunk.start, request.kept), end, writes)
            reads.append((slot, chunk.start, end))
        for kind, written in enumerate(writes):
            assert not {(kind, page) for page, _ in written} & frozen, (
                "a page that others may read is written"
            )
            self.kv[kind].update(written)
        for slot, start, end in reads:
            self._read(slot, start, end)
        return [self._sample(self.slots[r.slot]) for r in plan.decodes] + [
            self._sample(self.slots[c.request.slot]) if c.final else -1 for c in plan.chunks
        ]

    def _copy(self, copies: tuple[tuple[int, int, int], ...]) -> None:
        """One page after another, whole pages with whatever they hold."""
        assert len({(kind, target) for _, target, kind in copies}) == len(copies), (
            "two pages are copied to one"
        )
        for source, target, kind in copies:
            pages = self.kv[kind]
            for offset in range(self.page_size):
                pages.pop((target, offset), None)
                if (source, offset) in pages:
                    pages[target, offset] = pages[source, offset]

    def _place(self, slot: Slot, kind: int, position: int) -> tuple[int, int]:
        return slot.tables[kind][position // self.page_size], position % self.page_size

    def _write(
        self, slot: Slot, start: int, end: int, writes: list[dict[tuple[int, int], int]]
    ) -> None:
        for position, digest in list(enumerate(digests(slot.tokens[:end])))[start:]:
            for kind, written in enumerate(writes):
                place = self._place(slot, kind, position)
                assert place not in written, "two rows write one place"
                written[place] = digest

    def _read(self, slot: Slot, start: int, end: int) -> None:
        """What the tokens [start, end) read, in each kind of layers, whole tiles at a time."""
        known = digests(slot.tokens[:end])
        for number, kind in enumerate(self.kinds):
            first = 0 if kind.window is None else max(0, start - kind.window + 1)
            for position in range(first // kind.tile * kind.tile, end):
                found = self.kv[number].get(self._place(slot, number, position))
                assert found == known[position], (
                    f"{slot.request.id} reads wrong KV at {position} in kind {number}"
                )

    def _sample(self, slot: Slot) -> int:
        if not slot.alive:
            return -1
        token = draw(digests(slot.tokens)[-1], slot.request.seed)
        slot.tokens.append(token)
        slot.remaining -= 1
        slot.alive = token != EOS and slot.remaining > 0
        return token
