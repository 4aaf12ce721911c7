"""Lane programs of routing: a warp chooses a token's experts, and a warpgroup groups the tokens.

A lane of a warp holds some neighbouring experts of a token. The warp finds the best expert that is
left, K times. Then each expert has a bit for each token that chose it, and bits are counted.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from pallas_kernels.lanes import LANES, Machine

WARP = 32
WARPS = LANES // 32
LOWEST = -(2**31)  # below every score
LOG2E = math.log2(math.e)


class Weighing(NamedTuple):
    """Scores and weights that the programs know.

    Attributes:
        sigmoid: scores are sigmoids of logits, else their softmax.
        normalised: weights add up to 1.
    """

    sigmoid: bool
    normalised: bool


class Spec(NamedTuple):
    """Static parameters of a compiled kernel."""

    T: int
    E: int
    K: int
    shared: bool  # every tile holds all tokens
    tile: int
    tiles: int
    weighing: Weighing
    scale: float
    interpret: Any

    @property
    def fours(self) -> int:
        """Tokens by fours, one a warp."""
        return -(-self.T // WARPS)

    @property
    def held(self) -> int:
        """Experts of a lane when it chooses."""
        return -(-self.E // WARP)

    @property
    def rows(self) -> int:
        """Rows of all tiles."""
        return self.tiles * self.tile

    @property
    def words(self) -> int:
        """Words of an expert's bits."""
        return -(-self.T // 32)


def choose_one(m: Machine, spec: Spec, *words: Any) -> None:
    """Experts and weights of the only token, into the last two of `words`."""
    logits, *correction, expert_K, weight_K = words
    expert, weight = choose(m, spec, logits, correction, m.constant(0))
    there = m.both(m.equal(m.warp, 0), m.below(m.lane, spec.K))
    m.put_word(expert_K, m.lane, expert, there)
    m.put_word(weight_K, m.lane, m.as_float(weight), there)


def choose(m: Machine, spec: Spec, logits: Any, correction: list[Any], token: Any) -> list[Any]:
    """The expert and the weight (its bits) of the warp's token, choice k in lane k of the warp; no
    expert and weight 0 in others."""
    row = m.times(m.imin(token, spec.T - 1), spec.E)
    experts = [m.add(m.times(m.lane, spec.held), j) for j in range(spec.held)]
    held_logits = [m.word(logits, m.add(row, m.imin(e, spec.E - 1))) for e in experts]
    there = [m.below(e, spec.E) for e in experts]
    keys = [_ordered(m, x) for x in held_logits]
    peak = _float(m, m.warp_max(functools.reduce(m.imax, keys)))
    whole = not spec.weighing.sigmoid and (bool(correction) or not spec.weighing.normalised)
    total = m.constant(1.0)
    if whole:
        parts = [
            m.select(t, _power(m, x, peak), 0.0) for t, x in zip(there, held_logits, strict=True)
        ]
        total = _sum(m, functools.reduce(m.fadd, parts))

    def score(x: Any) -> Any:
        if spec.weighing.sigmoid:
            return m.reciprocal(m.fadd(m.exp2(m.fmul(x, -LOG2E)), 1.0))
        power = _power(m, x, peak)
        if whole:
            return m.fmul(power, m.reciprocal(total))
        return power

    for words in correction:
        corrections = [m.word(words, m.imin(e, spec.E - 1)) for e in experts]
        keys = [
            _ordered(m, m.fadd(score(x), c)) for x, c in zip(held_logits, corrections, strict=True)
        ]
    keys = [m.select(t, key, LOWEST) for t, key in zip(there, keys, strict=True)]
    expert = _best(m, spec, experts, keys)
    value = m.word(logits, m.add(row, expert))
    weight = m.select(m.below(m.lane, spec.K), score(value), 0.0)
    if spec.weighing.normalised:
        weight = m.fmul(weight, m.reciprocal(m.fadd(_sum(m, weight), 1e-20)))
    return [expert, m.as_integer(m.fmul(weight, spec.scale))]


def _best(m: Machine, spec: Spec, experts: list[Any], keys: list[Any]) -> Any:
    """The k-th expert by key in lane k, of equal ones the lower first."""
    expert = m.constant(0)
    for k in range(spec.K):
        top = m.warp_max(functools.reduce(m.imax, keys))
        first = m.constant(spec.E - 1)
        for e, key in reversed(list(zip(experts, keys, strict=True))):
            first = m.select(m.equal(key, top), m.imin(e, spec.E - 1), first)
        winner = m.warp_min(first)
        keys = [
            m.select(m.equal(e, winner), LOWEST, key) for e, key in zip(experts, keys, strict=True)
        ]
        expert = m.select(m.equal(m.lane, k), winner, expert)
    return expert


def _ordered(m: Machine, x: Any) -> Any:
    """An integer that is larger for a larger float."""
    bits = m.as_integer(x)
    return m.flip(bits, m.band(m.right(bits, 31), 2**31 - 1))


def _float(m: Machine, key: Any) -> Any:
    """The float of such an integer."""
    return m.as_float(m.flip(key, m.band(m.right(key, 31), 2**31 - 1)))


def _power(m: Machine, x: Any, peak: Any) -> Any:
    return m.exp2(m.fmul(m.fadd(x, m.fmul(peak, -1.0)), LOG2E))


def _sum(m: Machine, x: Any) -> Any:
    """The sum over the warp, equal in all lanes."""
    for mask in (16, 8, 4, 2, 1):
        x = m.fadd(x, m.shuffle(x, mask))
    return x


def clear(m: Machine, spec: Spec, bits: Any, *token_P: Any) -> None:
    """No token has chosen yet, and no row is taken."""
    for words, size in ((bits, spec.E * spec.words), *((t, spec.rows) for t in token_P)):
        for index, there in _every(m, size):
            m.put_word(words, index, 0, there)


def mark(m: Machine, spec: Spec, chosen: Any, bits: Any) -> None:
    """Sets the bit of each token that chose an expert."""
    for _, there, t, expert, _ in _pairs(m, spec, chosen):
        index = _word_of(m, spec, expert, t)
        m.or_word(bits, index, m.left(m.constant(1), m.band(t, 31)), there)


def lay_out(
    m: Machine, spec: Spec, bits: Any, begin: Any, expert_W: Any, rows_W: Any, used: Any
) -> None:
    """Gives each expert the tiles that its tokens need, in the order of experts. `begin` gets the
    row of the first token of each word of bits. Every warp counts, and each writes a share."""
    rows = []
    tiles = []
    ahead = m.constant(0)
    for j in range(spec.held):
        e = m.add(m.times(m.lane, spec.held), j)
        words = []
        size = m.constant(0)
        for w in range(spec.words):
            words.append(size)
            index = m.add(m.times(m.imin(e, spec.E - 1), spec.words), w)
            size = m.add(size, m.ones(m.word(bits, index)))
        size = m.select(m.below(e, spec.E), size, 0)
        if spec.shared:
            size = m.select(m.below(m.constant(0), size), spec.T, 0)
        count = m.right(m.add(size, spec.tile - 1), spec.tile.bit_length() - 1)
        rows.append((e, size, words))
        tiles.append((ahead, count))
        ahead = m.add(ahead, count)
    until = _running(m, ahead)
    before = m.subtract(until, ahead)
    for j, ((e, size, words), (within, count)) in enumerate(zip(rows, tiles, strict=True)):
        first = m.add(before, within)
        mine = m.both(m.equal(m.warp, j % WARPS), m.below(e, spec.E))
        for w, earlier in enumerate(words):
            row = m.add(m.times(first, spec.tile), earlier)
            m.put_word(begin, m.add(m.times(e, spec.words), w), row, mine)
        for i in range(-(-spec.T // spec.tile)):
            there = m.both(mine, m.below(m.constant(i), count))
            m.put_word(expert_W, m.add(first, i), e, there)
            left = m.imin(m.add(size, -i * spec.tile), spec.tile)
            m.put_word(rows_W, m.add(first, i), left, there)
    total = m.warp_max(until)
    for tile, there in _every(m, spec.tiles):
        unused = m.both(there, m.below(total, m.add(tile, 1)))
        m.put_word(expert_W, tile, 0, unused)
        m.put_word(rows_W, tile, 0, unused)
    ((_, first),) = _every(m, 1)
    m.put_word(used, m.constant(0), total, first)


def place(
    m: Machine,
    spec: Spec,
    chosen: Any,
    bits: Any,
    begin: Any,
    rows: Any,
    weights: Any,
    *token_P: Any,
) -> None:
    """Gives each choice its row: tokens of an expert keep their order. Where tiles are shared, a
    token has its number there."""
    for pair, there, t, expert, weight in _pairs(m, spec, chosen):
        index = _word_of(m, spec, expert, t)
        lower = m.subtract(m.left(m.constant(1), m.band(t, 31)), 1)  # bits of earlier tokens
        if spec.shared:
            ahead = t
        else:
            ahead = m.ones(m.band(m.word(bits, index), lower))
        row = m.add(m.word(begin, index), ahead)
        m.put_word(rows, pair, row, there)
        m.put_word(weights, pair, m.as_float(weight), there)
        for token in token_P:
            m.put_word(token, row, t, there)


def _every(m: Machine, size: int) -> list[tuple[Any, Any]]:
    """The places of `size` words that a lane sees to, and whether each is there."""
    lane = m.add(m.times(m.warp, WARP), m.lane)
    places = [m.add(lane, start) for start in range(0, size, LANES)]
    return [(index, m.below(index, size)) for index in places]


def _pairs(m: Machine, spec: Spec, chosen: Any) -> list[tuple[Any, ...]]:
    """Of each choice that a lane sees to: its number, whether it is there, its token, its expert
    and its weight. All are read before the caller writes: reads do not wait for each other."""
    pairs = []
    for pair, there in _every(m, spec.T * spec.K):
        t, k = _token(m, spec, pair)
        index = _register(m, t, k)
        pairs.append((pair, there, t, m.word(chosen, index), m.word(chosen, m.add(index, 1))))
    return pairs


def _token(m: Machine, spec: Spec, pair: Any) -> tuple[Any, Any]:
    """Token and choice of a pair; of a pair beyond the last, those of the last."""
    pair = m.imin(pair, spec.T * spec.K - 1)
    # Exact for pairs below 65536 / K
    t = m.right(m.times(pair, 65536 // spec.K + 1), 16)
    return t, m.subtract(pair, m.times(t, spec.K))


def _register(m: Machine, t: Any, k: Any) -> Any:
    """Where `choose` left the expert of a choice; its weight follows."""
    return m.times(m.add(m.times(t, WARP), k), 2)


def _word_of(m: Machine, spec: Spec, expert: Any, t: Any) -> Any:
    """Where an expert's bit of a token is."""
    return m.add(m.times(expert, spec.words), m.right(t, 5))


def _running(m: Machine, x: Any) -> Any:
    """The sum of this and all lower lanes of the warp."""
    for distance in (1, 2, 4, 8, 16):
        below = m.lower(x, distance)
        x = m.add(x, m.select(m.below(m.lane, distance), 0, below))
    return x
