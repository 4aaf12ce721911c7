"""Paged decode on Hopper with heads of 256 and keys for rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pallas_kernels.paged_decode.cases import CASES
from tests.pallas_kernels.test_mosaic_decode import SMALL, run


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.slow
@pytest.mark.parametrize("group", [2, 9])
def test_wide_heads_with_keys_for_rows_merge_to_the_reference(group: int) -> None:
    case = next(c for c in CASES if c.name == "heads of 256 in pairs, softcap and window")
    case = replace(case, heads=2 * group)
    assert run(case, SMALL._replace(blocks=4, cluster=1, swapped=True)) < 5e-3
