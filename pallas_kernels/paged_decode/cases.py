"""Cases that every back end of paged decode must pass; tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pallas_kernels.layout import AttentionCase, Pages, dense_attention, in_pages, made


@dataclass(frozen=True, kw_only=True)
class Case(AttentionCase):
    """Shapes and contents of one call. `lengths` has one entry a row, 0 = not in use."""

    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call as numpy arrays (float32), and the expected output."""

    q: np.ndarray
    pages: Pages
    lengths: np.ndarray
    expected: np.ndarray

    @property
    def args(self) -> tuple[np.ndarray, ...]:
        """Positional arguments of the op."""
        return (self.q, self.pages.k, self.pages.v, self.pages.table, self.lengths)


CASES = (
    Case(name="one token", lengths=(1,)),
    Case(name="ragged", lengths=(1, 5, 16, 17, 33, 200)),
    Case(name="around a tile's edge", lengths=(127, 128, 129, 255, 256, 257)),
    Case(name="dead rows between live ones", lengths=(0, 40, 0, 0, 7, 0)),
    Case(name="nobody alive", lengths=(0, 0, 0)),
    Case(name="one long row among short ones", lengths=(3, 900, 2, 1)),
    Case(name="MHA", lengths=(9, 50), heads=4, kv_heads=4),
    Case(name="MQA", lengths=(9, 50), heads=8, kv_heads=1),
    Case(
        name="groups of seven", lengths=(65, 130), heads=14, kv_heads=2, head_dim=128, page_size=64
    ),
    Case(name="pages of 64", lengths=(64, 1, 63, 65, 190), page_size=64, head_dim=128),
    Case(name="pages of 128", lengths=(128, 300), page_size=128),
    Case(name="pages of 256, larger than a tile", lengths=(1, 256, 300), page_size=256),
    Case(name="pages of 1", lengths=(1, 30), page_size=1, head_dim=16),
    Case(name="pages that do not divide a tile", lengths=(100, 31), page_size=24),
    Case(name="small heads", lengths=(20, 3), head_dim=16),
    Case(name="heads of 80", lengths=(20, 3), head_dim=80),
    Case(
        name="heads of 96",
        lengths=(300, 0, 64, 5),
        kv_heads=4,
        head_dim=96,
        page_size=64,
        sinks=True,
    ),
    Case(name="window", lengths=(1, 31, 32, 33, 300), window=32),
    Case(name="window of one", lengths=(1, 40), window=1),
    Case(name="window wider than anything", lengths=(10, 60), window=4096),
    Case(
        name="window with pages of 64", lengths=(500, 0, 64), window=100, page_size=64, head_dim=128
    ),
    Case(name="softcap", lengths=(12, 140), softcap=2.0),
    Case(name="softcap and window", lengths=(12, 140), softcap=5.0, window=20),
    Case(name="sinks", lengths=(1, 0, 12, 300), heads=6, sinks=True),
    Case(
        name="sinks, window and softcap", lengths=(12, 0, 140), softcap=5.0, window=20, sinks=True
    ),
    Case(
        name="sinks, groups of seven, pages of 64",
        lengths=(65, 3, 0, 500),
        heads=14,
        head_dim=128,
        page_size=64,
        sinks=True,
    ),
    Case(
        name="sinks and a window, 71 heads on one",
        lengths=(40, 0, 3, 90),
        heads=71,
        kv_heads=1,
        window=33,
        sinks=True,
    ),
    Case(
        name="values narrower than keys",
        lengths=(12, 0, 140),
        head_dim=24,
        value_dim=16,
        sinks=True,
    ),
    Case(
        name="heads of 256 in pairs, softcap and window",
        lengths=(65, 0, 300, 7),
        heads=4,
        kv_heads=2,
        head_dim=256,
        page_size=64,
        softcap=5.0,
        window=150,
    ),
    Case(name="infinite poison", lengths=(0, 12, 140), poison=float("inf")),
    Case(name="a table without spare entries", lengths=(48, 17), spare=0),
)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """The arguments of a case, with the output computed the long way in float64."""
    rng = np.random.default_rng(seed)
    sequences = [made(rng, case, n) for n in case.lengths]
    q = rng.standard_normal((len(case.lengths), case.heads, case.head_dim)).astype(np.float32)
    pages = in_pages(
        [s[0] for s in sequences],
        [s[1] for s in sequences],
        case.page_size,
        case.spare,
        case.poison,
        seed,
    )
    expected = np.zeros((*q.shape[:2], pages.v.shape[-1]))
    for row, (k, v) in enumerate(sequences):
        if len(k):
            expected[row] = dense_attention(q[row : row + 1], k, v, **case.options)[0]
    return Inputs(q, pages, np.array(case.lengths, np.int32), expected)
