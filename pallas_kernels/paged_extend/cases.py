"""Cases that every back end of paged extend must pass; tests and benchmarks share them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pallas_kernels.layout import AttentionCase, Pages, dense_attention, in_pages, made


@dataclass(frozen=True, kw_only=True)
class Case(AttentionCase):
    """Shapes and contents of one call. `rows` holds (cached prefix, chunk length) pairs, chunk 0 =
    not in use; `gap` tokens of no row lie before each chunk and after the last."""

    rows: tuple[tuple[int, int], ...]
    gap: int = 0


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call as numpy arrays (float32), and the expected output."""

    q: np.ndarray
    pages: Pages
    starts: np.ndarray
    lengths: np.ndarray
    kv_lengths: np.ndarray
    expected: np.ndarray

    @property
    def args(self) -> tuple[np.ndarray, ...]:
        """Positional arguments of the op."""
        return (
            self.q,
            self.pages.k,
            self.pages.v,
            self.pages.table,
            self.starts,
            self.lengths,
            self.kv_lengths,
        )


CASES = (
    Case(name="one token", rows=((0, 1),)),
    Case(name="one prompt", rows=((0, 50),)),
    Case(name="ragged prompts", rows=((0, 1), (0, 31), (0, 32), (0, 33), (0, 7))),
    Case(name="around a tile's edge", rows=((0, 127), (0, 128), (0, 129), (126, 3))),
    Case(name="chunks after a prefix", rows=((5, 20), (64, 64), (100, 1), (17, 40))),
    Case(name="a short chunk after a long prefix", rows=((700, 9), (0, 9))),
    Case(name="rows not in use", rows=((0, 0), (3, 12), (0, 0), (40, 0), (0, 33), (0, 0))),
    Case(name="nothing in use", rows=((0, 0), (0, 0)), gap=20),
    Case(name="tokens of no row", rows=((0, 3), (20, 40), (0, 1)), gap=11),
    Case(name="MHA", rows=((0, 40), (9, 9)), heads=4, kv_heads=4),
    Case(name="MQA", rows=((0, 40), (9, 9)), heads=8, kv_heads=1),
    Case(
        name="groups of seven",
        rows=((0, 70), (64, 10)),
        heads=14,
        kv_heads=2,
        head_dim=128,
        page_size=64,
    ),
    Case(name="pages of 64", rows=((0, 64), (63, 66), (128, 5)), page_size=64, head_dim=128),
    Case(name="pages of 128", rows=((0, 150), (128, 20)), page_size=128),
    Case(name="pages of 256, larger than a tile", rows=((250, 12), (0, 3)), page_size=256),
    Case(name="pages of 1", rows=((0, 30), (7, 3)), page_size=1, head_dim=16),
    Case(name="pages that do not divide a tile", rows=((0, 100), (31, 20)), page_size=24),
    Case(name="heads of 80", rows=((0, 20), (5, 3)), head_dim=80),
    Case(name="heads of 96", rows=((100, 140), (0, 3)), head_dim=96, gap=2, sinks=True),
    Case(name="window", rows=((0, 50), (100, 40), (300, 3), (31, 2)), window=32),
    Case(name="window of one", rows=((0, 40), (7, 1)), window=1),
    Case(name="window wider than anything", rows=((0, 40), (7, 9)), window=4096),
    Case(
        name="window with pages of 64",
        rows=((400, 130), (0, 64)),
        window=100,
        page_size=64,
        head_dim=128,
    ),
    Case(name="softcap", rows=((0, 40), (120, 12)), softcap=2.0),
    Case(name="softcap and window", rows=((0, 40), (120, 12)), softcap=5.0, window=20),
    Case(name="sinks", rows=((0, 40), (0, 0), (120, 12)), heads=6, gap=3, sinks=True),
    Case(
        name="sinks, window and softcap",
        rows=((0, 40), (120, 12)),
        softcap=5.0,
        window=20,
        sinks=True,
    ),
    Case(
        name="sinks, groups of seven, pages of 64",
        rows=((500, 30), (0, 3)),
        heads=14,
        head_dim=128,
        page_size=64,
        sinks=True,
    ),
    Case(
        name="sinks and a window, 71 heads on one",
        rows=((40, 3), (0, 9)),
        heads=71,
        kv_heads=1,
        window=33,
        sinks=True,
    ),
    Case(
        name="values narrower than keys",
        rows=((0, 40), (0, 0), (120, 12)),
        head_dim=24,
        value_dim=16,
        sinks=True,
    ),
    Case(name="infinite poison", rows=((0, 40), (0, 0), (90, 12)), poison=float("inf"), gap=2),
    Case(name="a table without spare entries", rows=((0, 48), (17, 20)), spare=0),
)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """The arguments of a case, with the output computed the long way in float64. Tokens of no row
    hold poison too."""
    rng = np.random.default_rng(seed)
    sequences = [made(rng, case, prefix + n) for prefix, n in case.rows]
    pages = in_pages(
        [s[0] for s in sequences],
        [s[1] for s in sequences],
        case.page_size,
        case.spare,
        case.poison,
        seed,
    )
    lengths = np.array([n for _, n in case.rows], np.int32)
    starts = np.cumsum(case.gap + lengths) - lengths
    q = np.full(
        (int(lengths.sum()) + case.gap * (len(lengths) + 1), case.heads, case.head_dim),
        case.poison,
        np.float32,
    )
    expected = np.zeros((*q.shape[:2], pages.v.shape[-1]))
    for start, n, (k, v) in zip(starts, lengths, sequences, strict=True):
        if n:
            q[start : start + n] = rng.standard_normal((n, case.heads, case.head_dim))
            expected[start : start + n] = dense_attention(
                q[start : start + n], k, v, **case.options
            )
    kv_lengths = np.array([prefix + n for prefix, n in case.rows], np.int32)
    return Inputs(q, pages, starts.astype(np.int32), lengths, kv_lengths, expected)
