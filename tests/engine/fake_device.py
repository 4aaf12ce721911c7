"""A device without arithmetic, for tests of the scheduler.

Instead of keys and values a page holds, for every token, a digest of the whole prefix up to it.
Each row checks every digest that attention would read, so one wrong, stale or unwritten page shows
itself; layers with a window read what they see and what lies in the same tile. The next token is a
function of the digest and the request's seed, so a request's output is known beforehand, whatever
it shared a batch with. Drafts are the tokens that follow, but for some that are wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxllm.cache.pool import Lifetime
from jaxllm.engine.output.beam_search import BeamSearch, Finished, Rules
from jaxllm.engine.scheduling.plan import Plan, pages_of_decode
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


def ends(request: Request, tokens: list[int]) -> bool:
    """Whether a sequence of the request ends with a token that stops it."""
    output = len(tokens) - len(request.prompt.tokens)
    return tokens[-1] in request.stops and output > request.params.min_tokens


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
    drafts: int = 0  # of a decode at most
    kv: list[dict[tuple[int, int], int]] = field(init=False)  # of each kind of layers
    slots: dict[int, Slot] = field(default_factory=dict)
    host: FakeHost = field(default_factory=FakeHost)
    # The token after a sequence of a request
    choose: Callable[[Request, list[int]], int] = lambda request, tokens: draw(
        digests(tokens)[-1], request.seed
    )

    def __post_init__(self) -> None:
        self.kv = [{} for _ in self.kinds]

    def run(self, plan: Plan, frozen: set[tuple[int, int]]) -> list[list[int]]:
        """Tokens per row of the plan (decodes, then chunks), none where a row has stopped or its
        prompt goes on. Pages of `frozen` (kind, page) must not be written."""
        return self.sample(plan, self.forward(plan, frozen))

    def forward(self, plan: Plan, frozen: set[tuple[int, int]]) -> list[list[int]]:
        """The first half of `run`: writes and reads KV. Returns the drafts of each decode."""
        copied = {(kind, target) for _, target, kind in plan.copies}
        self._copy(plan.copies)
        assert not copied & frozen, "a page that others may read is copied over"
        writes: list[dict[tuple[int, int], int]] = [{} for _ in self.kinds]
        reads: list[tuple[Slot, list[int], int]] = []
        self._write_tables(plan)
        drafts: list[list[int]] = []
        for decode in plan.decodes:
            request = decode.request
            slot = self.slots[request.slot]
            assert slot.request is request
            assert slot.tables == [table.pages for table in request.tables], "a page is missing"
            position = len(slot.tokens) - 1
            # KV of tokens that `max_tokens` cuts off is dropped
            count = min(decode.count, slot.remaining)
            drafts.append(self._proposed(slot, count - 1))
            if slot.alive:
                assert decode.first <= position, "pages may be released that the row still sees"
                assert position == decode.first or self.drafts
                tokens = slot.tokens + drafts[-1]
                self._write(slot, tokens, position, writes)
                reads.append((slot, tokens, position))
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
            self._write(slot, slot.tokens, max(chunk.start, request.kept), writes)
            reads.append((slot, slot.tokens, chunk.start))
        for kind, written in enumerate(writes):
            assert not {(kind, page) for page, _ in written} & frozen, (
                "a page that others may read is written"
            )
            self.kv[kind].update(written)
        for slot, tokens, start in reads:
            self._read(slot, tokens, start)
        self._sampling = [self.slots[row.request.slot] for row in (*plan.decodes, *plan.chunks)]
        return drafts

    def sample(self, plan: Plan, drafts: list[list[int]]) -> list[list[int]]:
        """The second half of `run`: draws the tokens of the last forward's rows."""
        inputs = [*drafts, *([] for _ in plan.chunks)]
        draws = [True] * len(plan.decodes) + [chunk.final for chunk in plan.chunks]
        return [
            self._sample(slot, row) if final else []
            for slot, row, final in zip(self._sampling, inputs, draws, strict=True)
        ]

    def _proposed(self, slot: Slot, count: int) -> list[int]:
        """`count` drafts of the tokens after a slot's, of which some are wrong."""
        drafts: list[int] = []
        for _ in range(count):
            tokens = slot.tokens + drafts
            wrong = digests(tokens)[-1] // VOCAB % 4 == 0
            drafts.append((self.choose(slot.request, tokens) + wrong) % VOCAB)
        return drafts

    def _write_tables(self, plan: Plan) -> None:
        """The page-table entries of a plan."""
        room = pages_of_decode(1 + self.drafts, self.page_size)
        most: Counter[tuple[int, int]] = Counter()
        for decode in plan.decodes:
            new = -(-decode.count // self.page_size)
            for group in range(len(self.kinds)):
                most[decode.request.slot, group] = min(room, 1 + new)
        entries = Counter((write.slot, write.group) for write in plan.table_writes)
        assert entries <= most, "more pages than there are entries for"
        places = {(write.slot, write.group, write.column) for write in plan.table_writes}
        assert len(places) == len(plan.table_writes), "a page is replaced by two"
        for index, at, page, group in plan.table_writes:
            table = self.slots[index].tables[group]
            assert at <= len(table)
            table[at : at + 1] = [page]

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
        self, slot: Slot, tokens: list[int], start: int, writes: list[dict[tuple[int, int], int]]
    ) -> None:
        """The tokens from `start` on."""
        for position, digest in list(enumerate(digests(tokens)))[start:]:
            for kind, written in enumerate(writes):
                place = self._place(slot, kind, position)
                assert place not in written, "two rows write one place"
                written[place] = digest

    def _read(self, slot: Slot, tokens: list[int], start: int) -> None:
        """What the tokens from `start` on read, in each kind of layers, whole tiles at a time."""
        known = digests(tokens)
        for number, kind in enumerate(self.kinds):
            first = 0 if kind.window is None else max(0, start - kind.window + 1)
            for position in range(first // kind.tile * kind.tile, len(tokens)):
                found = self.kv[number].get(self._place(slot, number, position))
                assert found == known[position], (
                    f"{slot.request.id} reads wrong KV at {position} in kind {number}"
                )

    def _sample(self, slot: Slot, drafts: list[int]) -> list[int]:
        """Draw behind the last token and each draft, up to the first that is not the next draft."""
        tokens: list[int] = []
        for draft in [*drafts, None]:
            if not slot.alive:
                break
            tokens.append(self.choose(slot.request, slot.tokens))
            slot.tokens.append(tokens[-1])
            slot.remaining -= 1
            slot.alive = slot.remaining > 0 and not ends(slot.request, slot.tokens)
            if tokens[-1] != draft:
                break
        return tokens
