"""Cases that every back end of latent decode must pass; tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pallas_kernels.layout import dense_attention, in_pages


@dataclass(frozen=True, kw_only=True)
class Case:
    """Shapes and contents of one call. `lengths` has one entry a row, 0 = not in use; `poison` is
    what places hold that no row sees."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 16
    width: int = 24
    value_dim: int = 16
    page_size: int = 16
    spare: int = 2
    poison: float = float("nan")

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the op."""
        return {"scale": self.width**-0.5, "value_dim": self.value_dim}


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call as numpy arrays (float32), and the expected output."""

    q: np.ndarray
    pages: np.ndarray
    table: np.ndarray
    lengths: np.ndarray
    expected: np.ndarray

    @property
    def args(self) -> tuple[np.ndarray, ...]:
        """Positional arguments of the op."""
        return (self.q, self.pages, self.table, self.lengths)


CASES = (
    Case(name="ragged", lengths=(1, 5, 16, 17, 33, 200)),
    Case(name="around a tile's edge", lengths=(63, 64, 65, 127, 128, 129, 257)),
    Case(name="dead rows between live ones", lengths=(0, 40, 0, 0, 7, 0)),
    Case(name="nobody alive", lengths=(0, 0, 0)),
    Case(name="one long row among short ones", lengths=(3, 900, 2, 1), heads=8),
    Case(name="pages that do not divide a tile", lengths=(100, 31), page_size=24),
    Case(name="the whole key is the value", lengths=(50, 3), width=32, value_dim=32),
    Case(name="infinite poison", lengths=(0, 12, 140), poison=float("inf")),
    Case(name="16 heads of 576", lengths=(65, 0, 3), width=576, value_dim=512, page_size=64),
    Case(
        name="128 heads of 576",
        lengths=(130, 1),
        heads=128,
        width=576,
        value_dim=512,
        page_size=64,
    ),
)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """The arguments of a case, with the output computed the long way in float64."""
    rng = np.random.default_rng(seed)
    sequences = [rng.standard_normal((n, 1, case.width)).astype(np.float32) for n in case.lengths]
    q = rng.standard_normal((len(case.lengths), case.heads, case.width)).astype(np.float32)
    pages = in_pages(sequences, sequences, case.page_size, case.spare, case.poison, seed)
    expected = np.zeros((*q.shape[:2], case.value_dim))
    how = {"scale": case.options["scale"], "window": None, "softcap": None}
    for row, k in enumerate(sequences):
        if len(k):
            values = k[..., : case.value_dim]
            expected[row] = dense_attention(q[row : row + 1], k, values, **how)[0]
    lengths = np.array(case.lengths, np.int32)
    return Inputs(q, pages.k[:, 0], pages.table, lengths, expected)
