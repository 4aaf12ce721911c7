"""The lane programs of decode over 8-bit pages on Hopper: what each warp does with its 16 tokens of
a tile.

Each of the consumer's four warps does flash attention of its own over 16 of a tile's 64 tokens, and
they meet when the share of a row ends. Scores are Sᵀ = K·Qᵀ and outputs Oᵀ = Vᵀ·P: the few queries
of a group are the short side of the tensor cores' 16 x 8 products, and the 8-bit numbers, on the
long side, go from shared memory to registers once and become float16 there. The order of summands
is free, so a lane multiplies the four numbers that it loads as one, and the queries are put in that
order.

A key's scale s is a factor of its score. A value's goes into the weight, in the log2 domain, so
that the weights fill the range of float16: p = 2^(score + log2 s − top), and the sum of weights
gets p / s. `top` is thus the maximum of score + log2 s.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.lanes import LANES, Machine
from pallas_kernels.mosaic_flash import LOG2E, NEVER
from pallas_kernels.paged_decode.mosaic_flash import Spec
from pallas_kernels.paged_decode.mosaic_peers import PAD

WARPS = 4
WARP_TOKENS = 16
# Below any sum of weights; where nothing was seen, outputs are 0 times its inverse
LEAST_TOTAL = 2.0**-126


class Tile(NamedTuple):
    """A tile in shared memory: keys and values as tiles of bytes, their scales `[2, tokens]`."""

    k: Any
    v: Any
    scales: Any


class State(NamedTuple):
    """One warp's flash attention: `mixed[block of 32 of H][half][queries / 8]` are 4 sums each, of
    (head column 0 | 2, query 0), (0 | 2, 1), (1 | 3, 0), (1 | 3, 1); `top` and `total` `[queries /
    8][2]` are of queries 2c and 2c + 1, and totals are yet to be added over g."""

    mixed: list[list[list[list[Any]]]]
    top: list[list[Any]]
    total: list[list[Any]]

    @property
    def registers(self) -> list[Any]:
        flat = [x for block in self.mixed for half in block for acc in half for x in acc]
        return flat + [x for pair in self.top + self.total for x in pair]

    @classmethod
    def of(cls, registers: list[Any], H: int, group: int) -> State:
        n = group // 8
        take = iter(registers)
        mixed = [
            [[[next(take) for _ in range(4)] for _ in range(n)] for _ in range(2)]
            for _ in range(H // 32)
        ]
        top, total = ([[next(take) for _ in range(2)] for _ in range(n)] for _ in range(2))
        return cls(mixed, top, total)

    @staticmethod
    def size(H: int, group: int) -> int:
        return (H // 4 + 4) * (group // 8)


def begin(m: Machine, spec: Spec) -> State:
    """The state before any tile."""
    size = State.size(spec.H, spec.group)
    tops = 2 * (spec.group // 8)
    zeros = [m.constant(0.0)] * (size - 2 * tops)
    return State.of(
        [*zeros, *[m.constant(NEVER)] * tops, *[m.constant(0.0)] * tops], spec.H, spec.group
    )


def read_queries(m: Machine, spec: Spec, rows: Any) -> list[Any]:
    """The queries as right sides of products, in float16: for each 8 of them and each 16 of H two
    registers."""
    out: list[Any] = []
    for n in range(spec.group // 8):
        for s in range(spec.H // 16):
            words = m.queries(rows, m.add(m.g, 8 * n), m.add(m.times(m.c, 4), 16 * s))
            if spec.dtype != "float16":
                words = [m.clamped(*m.wide(word)) for word in words]
            out += words
    return out


def offsets(m: Machine, spec: Spec) -> list[Any]:
    """Where a lane's words of a tile lie: of keys for each 16 of H, in the row of its token g, then
    of values for each 32 of H and two tokens. The same for every tile, they are found once a row of
    the batch."""
    H = spec.H
    piece = min(spec.H, 128)
    mine = m.times(m.warp, WARP_TOKENS)
    token = m.add(mine, m.g)
    sub = m.times(m.c, 4)
    keys = [m.offset(H, token, sub, s % piece // 16, s // piece) for s in range(0, H, 16)]
    chunk = m.bits(m.g, 2, 1)
    sub = m.times(m.bits(m.g, 0, 2), 4)
    tokens = [m.add(m.add(mine, m.times(m.c, 2)), i) for i in range(2)]
    return keys + [
        m.offset(H, token, sub, m.add(chunk, b % piece // 16), b // piece)
        for b in range(0, H, 32)
        for token in tokens
    ]


def constants(spec: Spec) -> int:
    """Registers that a row of the batch keeps beside its state: queries and, where there is room
    for them, offsets."""
    return spec.H * spec.group // 64 + (spec.H // 8 if _keeps_offsets(spec) else 0)


def _keeps_offsets(spec: Spec) -> bool:
    return spec.H * spec.group <= 2048


def read_row(m: Machine, spec: Spec, rows: Any) -> list[Any]:
    """The constants of a row of the batch."""
    return read_queries(m, spec, rows) + (offsets(m, spec) if _keeps_offsets(spec) else [])


def fold(
    m: Machine, spec: Spec, tile: Tile, place: tuple[Any, Any], row: list[Any], state: State
) -> State:
    """One step of online softmax over a warp's tokens of a tile; `place` is the position of the
    tile's first token and the row's length, and `row` its constants."""
    first, length = place
    count = spec.H * spec.group // 64
    queries = row[:count]
    lane_offsets = row[count:] or offsets(m, spec)
    mine = m.times(m.warp, WARP_TOKENS)

    def seen(token: Any) -> Any:
        position = m.add(first, token)
        inside = m.below(position, length)
        if spec.window is None:
            return inside
        return m.both(inside, m.below(m.add(length, -spec.window - 1), position))

    key = m.add(mine, m.g)
    scores = _scores(m, spec, (tile.k, lane_offsets[: spec.H // 16]), queries)
    visible = [seen(m.add(key, 8 * i)) for i in range(2)]
    factors = [m.fmul(m.scale(tile.scales, 0, key, 8 * i), _factor(spec)) for i in range(2)]
    logs = [
        m.select(ok, m.log2(m.scale(tile.scales, 1, key, 8 * i)), 0.0)
        for i, ok in enumerate(visible)
    ]
    inverse = [m.exp2(m.fmul(x, -1.0)) for x in logs]
    top = []
    total = []
    decays = []
    weights = []
    for n, score in enumerate(scores):
        pairs = []
        for i in range(2):  # query 2c + i of these 8
            points = []
            for r in range(2):  # token g + 8r
                point = m.fmul(score[2 * r + i], factors[r])
                if spec.softcap is not None:
                    point = m.fmul(m.tanh(point), spec.softcap * LOG2E)
                points.append(m.select(visible[r], m.fadd(point, logs[r]), float("-inf")))
            pairs.append(_weigh(m, points, inverse, state.top[n][i], state.total[n][i]))
        top.append([pair[0] for pair in pairs])
        total.append([pair[1] for pair in pairs])
        decays.append([pair[2] for pair in pairs])
        weights.append([m.transpose(m.pair(pairs[0][3][r], pairs[1][3][r])) for r in range(2)])
    value = m.add(mine, m.times(m.c, 2))
    mixed = _mix(
        m,
        spec,
        (tile.v, lane_offsets[spec.H // 16 :], [seen(m.add(value, i)) for i in (0, 1, 8, 9)]),
        (weights, decays),
        state,
    )
    return State(mixed, top, total)


def _factor(spec: Spec) -> float:
    if spec.softcap is None:
        return spec.scale * LOG2E
    return spec.scale / spec.softcap


def _scores(
    m: Machine, spec: Spec, keys: tuple[Any, list[Any]], queries: list[Any]
) -> list[list[Any]]:
    """For each 8 queries the scores of (token g, query 2c), (g, 2c + 1), (g + 8, 2c), (g + 8, 2c +
    1), unscaled."""
    k, offsets_of_16 = keys
    steps = spec.H // 16
    zero = m.constant(0.0)
    # Two chains, since each product waits for the one before
    sums = [[[zero] * 4 for _ in range(spec.group // 8)] for _ in range(2)]
    for s in range(steps):
        halves = [
            m.floats(m.load(k, offsets_of_16[s], down), str(spec.kv_dtype)) for down in range(2)
        ]
        left = [halves[0][0], halves[1][0], halves[0][1], halves[1][1]]
        for n, chain in enumerate(sums[s % 2]):
            first = 2 * (n * steps + s)
            sums[s % 2][n] = m.multiply(chain, left, queries[first : first + 2])
    return [
        [m.fadd(x, y) for x, y in zip(even, odd, strict=True)]
        for even, odd in zip(*sums, strict=True)
    ]


def _weigh(
    m: Machine, points: list[Any], inverse: list[Any], top: Any, total: Any
) -> tuple[Any, Any, Any, list[Any]]:
    """New maximum and total, decay, and the weights of two tokens."""
    new = m.fmax(top, m.fmax(*points))
    for mask in (4, 8, 16):
        new = m.fmax(new, m.shuffle(new, mask))
    below = m.fmul(new, -1.0)
    decay = m.exp2(m.fadd(top, below))
    weights = [m.exp2(m.fadd(point, below)) for point in points]
    total = m.fmul(total, decay)
    for weight, factor in zip(weights, inverse, strict=True):
        total = m.fma(weight, factor, total)
    return new, total, decay, weights


def _mix(
    m: Machine,
    spec: Spec,
    values: tuple[Any, list[Any], list[Any]],
    by: tuple[list, list],
    state: State,
) -> list[list[list[list[Any]]]]:
    """The sums of weighted values, decayed and with this tile's added. Words of values that are not
    seen are zeroed: 0 · NaN is NaN."""
    v, offsets_of_32, visible = values
    weights, decays = by
    dtype = str(spec.kv_dtype)
    mixed = []
    for block in range(spec.H // 32):
        four = [
            m.load(v, offset, down)
            for down in range(2)
            for offset in offsets_of_32[2 * block : 2 * block + 2]
        ]
        words = [m.select(ok, word, 0) for ok, word in zip(visible, four, strict=True)]
        halves = []
        # Bytes 0 and 1, or 2 and 3, of two tokens side by side
        for half, selector in enumerate((0x5140, 0x7362)):
            low, high = (
                m.floats(m.bytes_of(words[i], words[i + 1], selector), dtype) for i in (0, 2)
            )
            left = [low[0], low[1], high[0], high[1]]
            accs = []
            for n, acc in enumerate(state.mixed[block][half]):
                accs.append(
                    m.multiply(
                        [m.fmul(x, decays[n][i % 2]) for i, x in enumerate(acc)], left, weights[n]
                    )
                )
            halves.append(accs)
        mixed.append(halves)
    return mixed


def leave(m: Machine, spec: Spec, to: tuple[Any, Any], state: State) -> None:
    """Leave each warp's sums as they are, rows warp · group + query of `[warps · group, H + PAD]`,
    and its maxima and totals, `[warps · group, 2]`."""
    sums, tops = to
    for n in range(spec.group // 8):
        for i in range(2):
            query = m.add(m.times(m.c, 2), 8 * n + i)
            row = m.add(m.times(m.warp, spec.group), query)
            total = _over_tokens(m, state.total[n][i])
            m.put_words(tops, m.times(row, 2), [state.top[n][i], total])
            place = m.add(m.times(row, spec.H + PAD), m.times(m.g, 4))
            for block in range(spec.H // 32):
                first, second = (state.mixed[block][half][n] for half in range(2))
                four = [first[i], first[2 + i], second[i], second[2 + i]]
                m.put_words(sums, place, four, 32 * block)


def gather(
    m: Machine,
    spec: Spec,
    left: tuple[Any, Any],
    kept: tuple[Any, Any, Any],
    sinks: tuple[list[Any], Any, Any],
) -> None:
    """Add up what `WARPS` · consumers warps left: sums `[group, H + PAD]`, maxima and totals
    `[group]`. A lane has four columns of a query at a time.

    `sinks` are logits, the row of the first one's query, and whether they count (1 or 0).
    """
    sums, tops = left
    for query, column in _fours(m, spec):
        place = m.add(m.times(query, spec.H + PAD), column)
        partials = [
            m.words(tops, m.times(query, 2), 2, 2 * spec.group * warp)
            for warp in range(WARPS * spec.tuning.consumers)
        ]
        sink = _sink(m, query, *sinks)
        if sink is None:
            top = partials[0][0]
        else:
            top = m.fmax(partials[0][0], sink[0])
        for warp_top, _ in partials[1:]:
            top = m.fmax(top, warp_top)
        below = m.fmul(top, -1.0)
        total = m.constant(0.0)
        if sink is not None:
            total = m.fmul(m.exp2(m.fadd(sink[0], below)), sink[1])
        four = [m.constant(0.0)] * 4
        for warp, (warp_top, part) in enumerate(partials):
            weight = m.exp2(m.fadd(warp_top, below))
            total = m.fma(part, weight, total)
            values = m.words(sums, place, 4, warp * spec.group * (spec.H + PAD))
            four = [m.fma(x, weight, y) for x, y in zip(values, four, strict=True)]
        _keep(m, kept, (query, column, place), (top, total, four))


def _sink(
    m: Machine, query: Any, logits: list[Any], first_row: Any, counts: Any
) -> tuple[Any, Any] | None:
    """Maximum and total of a query's sink: a key with no value."""
    if not logits:
        return None
    top = m.constant(NEVER)
    total = m.constant(0.0)
    for i, logit in enumerate(logits):
        here = m.both(m.equal(query, m.add(first_row, i)), m.equal(counts, 1))
        top = m.select(here, m.fmax(m.fmul(logit, LOG2E), NEVER), top)
        total = m.select(here, 1.0, total)
    return top, total


def clear(m: Machine, spec: Spec, kept: tuple[Any, Any, Any]) -> None:
    """What `gather` keeps where there was no tile."""
    zero = m.constant(0.0)
    for query, column in _fours(m, spec):
        place = m.add(m.times(query, spec.H + PAD), column)
        _keep(m, kept, (query, column, place), (m.constant(NEVER), zero, [zero] * 4))


def _fours(m: Machine, spec: Spec) -> list[tuple[Any, Any]]:
    """Query and first of four columns of each unit of a lane."""
    mine = m.add(m.times(m.warp, 32), m.lane)
    bits = (spec.H // 4).bit_length() - 1
    units = [m.add(mine, first) for first in range(0, spec.group * spec.H // 4, LANES)]
    return [(m.right(unit, bits), m.times(m.bits(unit, 0, bits), 4)) for unit in units]


def _keep(
    m: Machine, kept: tuple[Any, Any, Any], unit: tuple[Any, Any, Any], state: tuple[Any, Any, Any]
) -> None:
    query, column, place = unit
    top, total, four = state
    m.put_words(kept[0], place, four)
    first = m.equal(column, 0)
    m.put_word(kept[1], query, top, first)
    m.put_word(kept[2], query, total, first)


def _over_tokens(m: Machine, total: Any) -> Any:
    """A query's total over the warp's tokens."""
    for mask in (4, 8, 16):
        total = m.fadd(total, m.shuffle(total, mask))
    return total


def finish(m: Machine, spec: Spec, to: tuple[Any, Any], first_row: Any, state: State) -> None:
    """Leave each warp's normalised outputs as rows warp · group + query of a 16-bit tile, and their
    log2-sum-exps. Rows of neighbours' queries, all but the G from `first_row` on, are zeros."""
    rows, lse = to
    for n in range(spec.group // 8):
        for i in range(2):
            query = m.add(m.times(m.c, 2), 8 * n + i)
            row = m.add(m.times(m.warp, spec.group), query)
            total = state.total[n][i]
            for mask in (4, 8, 16):
                total = m.fadd(total, m.shuffle(total, mask))
            m.put(lse, row, m.fadd(state.top[n][i], m.log2(total)))
            mine = m.both(
                m.below(m.add(first_row, -1), query), m.below(query, m.add(first_row, spec.G))
            )
            factor = m.reciprocal(m.fmax(total, LEAST_TOTAL))
            for block in range(spec.H // 32):
                first, second = (state.mixed[block][half][n] for half in range(2))
                four = [
                    m.select(mine, m.fmul(x, factor), 0.0)
                    for x in (first[i], first[2 + i], second[i], second[2 + i])
                ]
                chunk = m.add(m.bits(m.g, 1, 2), 4 * (block % 2))
                offset = m.offset(2 * spec.H, row, m.times(m.bits(m.g, 0, 1), 8), chunk, block // 2)
                m.store(rows, offset, four, jnp.dtype(spec.dtype).name)
