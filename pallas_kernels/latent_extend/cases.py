"""Cases that every back end of latent extend must pass; tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.latent_decode.rows import UpProjections
from pallas_kernels.layout import dense_attention, in_pages


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes of one call.

    Attributes:
        prefixes, chunks: Tokens of each row's cached prefix and of its chunk; a chunk of 0 is a row
            not in use.
        gap: Tokens of no row, after each chunk.
        plain, rope, value: Numbers of a head's key that do not turn and that turn, and of its
            value.
        rank: Numbers of a latent.
    """

    name: str
    prefixes: tuple[int, ...]
    chunks: tuple[int, ...]
    gap: int = 3
    heads: int = 4
    plain: int = 8
    rope: int = 4
    value: int = 6
    rank: int = 16
    page_size: int = 16

    @property
    def starts(self) -> np.ndarray:
        """Where each chunk begins."""
        sizes = [chunk + self.gap for chunk in self.chunks]
        return np.cumsum([0, *sizes])[:-1].astype(np.int32)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the op."""
        return {"scale": (self.plain + self.rope) ** -0.5}


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call as numpy arrays (float32), and what every token of a row should
    get."""

    q: np.ndarray
    up: UpProjections
    pages: np.ndarray
    places: tuple[np.ndarray, ...]
    expected: np.ndarray

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments of the op."""
        return (self.q, self.up, self.pages, *self.places)


CASES = (
    Case(name="a prompt", prefixes=(0,), chunks=(40,)),
    Case(name="chunks after prefixes", prefixes=(17, 0, 130), chunks=(5, 33, 16)),
    Case(name="a row that is not in use", prefixes=(9, 0, 2), chunks=(1, 0, 7)),
    Case(name="nobody", prefixes=(0, 0), chunks=(0, 0)),
    Case(name="without gaps", prefixes=(128, 3), chunks=(64, 64), gap=0),
)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """Keys and values are expanded in float64; places that no row sees hold NaN."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    keys, values = (draw(case.heads, n, case.rank) / 4 for n in (case.plain, case.value))
    totals = [a + b if b else 0 for a, b in zip(case.prefixes, case.chunks, strict=True)]
    entries = [draw(total, 1, case.rank + case.rope) for total in totals]
    q = draw(sum(case.chunks) + case.gap * len(case.chunks), case.heads, case.plain + case.rope)
    expected = np.zeros((*q.shape[:2], case.value))
    options = {**case.options, "window": None, "softcap": None}
    for start, chunk, row_entries in zip(case.starts, case.chunks, entries, strict=True):
        if chunk:
            latent = row_entries[:, 0, : case.rank]
            turned = row_entries[:, :, case.rank :]
            shared = np.repeat(turned, case.heads, axis=1)
            k = np.concatenate([np.einsum("tv,nev->tne", latent, keys), shared], axis=-1)
            v = np.einsum("tv,nfv->tnf", latent, values)
            rows = slice(start, start + chunk)
            expected[rows] = dense_attention(q[rows], k, v, **options)
    pages = in_pages(entries, entries, case.page_size, 2, float("nan"), seed)
    lengths = (np.array(case.chunks, np.int32), np.array(totals, np.int32))
    places = (pages.table, case.starts, *lengths)
    return Inputs(q, UpProjections(keys, values), pages.k[:, 0], places, expected)
