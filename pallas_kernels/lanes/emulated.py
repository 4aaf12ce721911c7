"""The machine that runs a lane program in JAX."""

from __future__ import annotations

import operator
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.lanes.ptx import LANES

HALF_LIMIT = 65504.0  # the largest float16


class Words:
    """A plain array of 32-bit words that a program reads and writes."""

    def __init__(self, array: Array):
        self.array = array
        self.written = False

    def at(self, place: Any) -> Array:
        return self.array.reshape(-1)[place]

    def put(self, place: Array, value: Array) -> None:
        """Stores, in lane order; places beyond the array are left out."""
        flat = self.array.reshape(-1).at[place].set(value, mode="drop")
        self.array = flat.reshape(self.array.shape)
        self.written = True


class Emulated:
    """Runs a program in JAX. Tiles are arrays of bytes, other arrays are what they are; `stored`
    collects what is stored."""

    def __init__(self) -> None:
        lane = jnp.arange(LANES, dtype=jnp.int32)
        self.warp = lane // 32
        self.g = lane // 4 % 8
        self.c = lane % 4
        self.stored: list[tuple[Array, Array, list[Array]]] = []
        self.numbers: list[tuple[Array, Array]] = []

    @property
    def lane(self) -> Array:
        return 4 * self.g + self.c

    def constant(self, value: float) -> Array:
        return jnp.full((LANES,), value, jnp.float32 if isinstance(value, float) else jnp.int32)

    def bits(self, a: Any, first: int, count: int) -> Array:
        return a >> first & ((1 << count) - 1)

    add = fadd = staticmethod(operator.add)
    subtract = staticmethod(operator.sub)
    times = fmul = staticmethod(operator.mul)
    imax = staticmethod(jnp.maximum)
    imin = staticmethod(jnp.minimum)
    left = staticmethod(operator.lshift)
    right = staticmethod(operator.rshift)
    band = staticmethod(operator.and_)
    flip = staticmethod(operator.xor)
    ones = staticmethod(lax.population_count)
    below = staticmethod(operator.lt)
    both = staticmethod(operator.and_)
    equal = staticmethod(operator.eq)
    select = staticmethod(jnp.where)
    fmax = staticmethod(jnp.fmax)
    exp2 = staticmethod(jnp.exp2)
    log2 = staticmethod(jnp.log2)
    tanh = staticmethod(jnp.tanh)

    def fma(self, a: Any, b: Any, c: Any) -> Array:
        return a * b + c

    def reciprocal(self, a: Any) -> Array:
        return 1 / a

    def shuffle(self, a: Array, mask: int) -> Array:
        return a[jnp.arange(LANES) ^ mask]

    def warp_max(self, a: Array) -> Array:
        return jnp.repeat(jnp.max(a.reshape(-1, 32), axis=1), 32)

    def warp_min(self, a: Array) -> Array:
        return jnp.repeat(jnp.min(a.reshape(-1, 32), axis=1), 32)

    def lower(self, a: Array, distance: int) -> Array:
        return jnp.where(self.lane >= distance, jnp.roll(a, distance), a)

    def as_integer(self, a: Array) -> Array:
        return lax.bitcast_convert_type(a, jnp.int32)

    def as_float(self, a: Array) -> Array:
        return lax.bitcast_convert_type(a, jnp.float32)

    def word(self, words: Words, index: Any) -> Array:
        return words.at(index)

    def words(self, words: Words, index: Any, count: int, after: int = 0) -> list[Array]:
        return [words.at(index + after + i) for i in range(count)]

    def put_words(self, words: Words, index: Any, values: list[Any], after: int = 0) -> None:
        for i, value in enumerate(values):
            words.put(
                index + after + i, jnp.broadcast_to(value, (LANES,)).astype(words.array.dtype)
            )

    def put_word(self, words: Words, index: Any, value: Any, where: Array) -> None:
        values = jnp.broadcast_to(jnp.asarray(value, words.array.dtype), (LANES,))
        words.put(jnp.where(where, index, words.array.size), values)

    def or_word(self, words: Words, index: Any, value: Any, where: Array) -> None:
        flat = words.array.reshape(-1)
        bit = jnp.arange(32, dtype=jnp.int32)
        bits = jnp.broadcast_to(value, (LANES,))[:, None] >> bit & 1
        hit = jnp.zeros((flat.size, 32), jnp.int32)
        hit = hit.at[jnp.where(where, index, flat.size)].max(bits, mode="drop")
        flat = flat | jnp.sum(hit << bit, axis=1, dtype=jnp.int32)
        words.array = flat.reshape(words.array.shape)
        words.written = True

    def bytes_of(self, a: Array, b: Array, selector: int) -> Array:
        source_bytes = jnp.concatenate([bits_of(a, jnp.uint8), bits_of(b, jnp.uint8)], axis=1)
        return joined(
            jnp.stack([source_bytes[:, selector >> (4 * i) & 7] for i in range(4)], axis=1)
        )

    def floats(self, a: Array, dtype: str) -> tuple[Array, Array]:
        numbers = lax.bitcast_convert_type(bits_of(a, jnp.uint8), jnp.dtype(dtype)).astype(
            jnp.float16
        )
        return joined(numbers[:, :2]), joined(numbers[:, 2:])

    def pair(self, low: Array, high: Array, dtype: str = "float16") -> Array:
        return joined(jnp.stack([low, high], axis=1).astype(dtype))

    def clamped(self, low: Array, high: Array) -> Array:
        return self.pair(*(jnp.clip(x, -HALF_LIMIT, HALF_LIMIT) for x in (low, high)))

    def halves(self, a: Array) -> tuple[Array, Array]:
        numbers = bits_of(a, jnp.float16).astype(jnp.float32)
        return numbers[:, 0], numbers[:, 1]

    def wide(self, a: Array) -> tuple[Array, Array]:
        numbers = bits_of(a, jnp.bfloat16).astype(jnp.float32)
        return numbers[:, 0], numbers[:, 1]

    def transpose(self, a: Array) -> Array:
        rows = bits_of(a, jnp.uint16).reshape(LANES // 32, 8, 8)
        return joined(rows.swapaxes(1, 2).reshape(LANES, 2))

    def multiply(self, acc: list[Array], a: list[Array], b: list[Array]) -> list[Array]:
        def quarters(x: Array) -> Array:
            """`[warps, 8, 8]`: row g, columns 2c and 2c + 1 of each lane."""
            return bits_of(x, jnp.float16).astype(jnp.float32).reshape(LANES // 32, 8, 8)

        left = jnp.block([[quarters(a[0]), quarters(a[2])], [quarters(a[1]), quarters(a[3])]])
        right = jnp.concatenate([quarters(x).swapaxes(1, 2) for x in b], axis=1)
        product = jnp.einsum("wmk,wkn->wmn", left, right, precision=lax.Precision.HIGHEST)
        parts = product.reshape(LANES // 32, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, LANES)
        return [x + y for x, y in zip(acc, parts, strict=True)]

    def offset(self, width: int, row: Array, sub: Any, chunk: Any, piece: int = 0) -> Array:
        # Rows one after the other: nothing is swizzled here
        return row * width + piece * min(width, 128) + chunk * 16 + sub

    def load(self, tile: tuple[Array, int], offset: Array, down: int = 0) -> Array:
        array, width = tile
        # Registers that were kept come as floats
        offset = lax.bitcast_convert_type(offset, jnp.int32)
        return joined(array.reshape(-1)[offset[:, None] + 8 * down * width + jnp.arange(4)])

    def store(
        self, tile: tuple[Any, int], offset: Array, values: list[Array], dtype: str, down: int = 0
    ) -> None:
        _, width = tile
        self.stored.append((offset // width + 8 * down, offset % width // 2, values))

    def scale(self, scales: tuple[Array, int], side: int, token: Array, after: int = 0) -> Array:
        return scales[0][side, token + after].astype(jnp.float32)

    def queries(self, rows: tuple[Array, int], row: Array, column: Array) -> list[Array]:
        numbers = rows[0][row[:, None], column[:, None] + jnp.arange(4)]
        return [joined(numbers[:, :2]), joined(numbers[:, 2:])]

    def put(self, numbers: Any, place: Array, value: Array) -> None:
        self.numbers.append((place, value))

    def written(self, shape: tuple[int, ...]) -> Array:
        """What was stored, in an array that is 0 elsewhere."""
        rows, columns = (
            jnp.stack([record[i] for record in self.stored])[:, None] for i in range(2)
        )
        values = jnp.stack([jnp.stack(record[2]) for record in self.stored])
        offset = lax.broadcasted_iota(jnp.int32, values.shape, 1)
        return jnp.zeros(shape, jnp.float32).at[rows, columns + offset].set(values)

    def put_down(self, shape: tuple[int, ...]) -> Array:
        """The numbers that were put, in an array that is 0 elsewhere."""
        out = jnp.zeros(shape, jnp.float32)
        for place, value in self.numbers:
            out = out.at[place].set(value)
        return out


def bits_of(x: Array, dtype: Any) -> Array:
    """Each lane's register as narrower numbers, the lowest first."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32), dtype)


def joined(x: Array) -> Array:
    """Narrow numbers `[128, n]` as one register a lane."""
    return lax.bitcast_convert_type(x, jnp.uint32)
