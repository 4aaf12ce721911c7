"""Two tiles of tokens that share columns out together: what each thread block has, and the 4-bit
product in the interpreter and on a card."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import mosaic_units
from pallas_kernels.int4_matmul import mosaic_gpu, plan
from pallas_kernels.int4_matmul.cases import Case, expected, inputs, packed
from pallas_kernels.int4_matmul.plan import Tuning
from pallas_kernels.model_shapes import LAYER_SHAPES
from pallas_kernels.mosaic_units.joined_shares import (
    WRITE_STEPS,
    Segment,
    fewer_segments_of,
    longest,
    most_shares,
    segments_of,
)
from pallas_kernels.parts import Parts, whole
from tests.pallas_kernels.places import (
    jitted,
    launch_options,
    places,
    relative_error,
)


def check_covered(found: list[list[Segment]], steps: int, shares: int) -> None:
    """Both tiles have every slot once, and every share is written once."""
    flat = [segment for own in found for segment in own]
    slots = sorted((s.band, i) for s in flat for i in range(s.first, s.first + s.steps))
    assert slots == [(band, i) for band in range(2) for i in range(steps)]
    written = sorted((s.band, s.share) for s in flat)
    assert written == [(band, share) for band in range(2) for share in range(shares)]
    assert all(s.steps > 0 for s in flat)
    cuts = [sorted(s[1:] for s in flat if s.band == band) for band in range(2)]
    assert cuts[0] == cuts[1], "the sums of a row do not depend on its tile"


@given(shares=st.integers(2, 9), more=st.integers(0, 300))
@settings(max_examples=60)
def test_both_tiles_have_every_slot_and_share_once(shares: int, more: int) -> None:
    steps = 2 * shares * shares + more
    found = segments_of(steps, shares)
    assert len(found) == 2 * shares - 1 and [len(own) for own in found].count(2) == 1
    check_covered(found, steps, shares)
    totals = [sum(s.steps for s in own) for own in found]
    assert max(totals) == longest(steps, shares)
    assert max(totals) <= (2 * steps + WRITE_STEPS) / (2 * shares - 1) + 1
    fewer = fewer_segments_of(steps, shares)
    assert len(fewer) == 2 * shares - 2
    check_covered(fewer, steps, shares)


def test_a_block_of_rows_has_no_more_thread_blocks_than_there_are() -> None:
    for blocks, idle, wanted in ((19, 1, 4), (19, 0, 3), (44, 0, 2), (60, 0, 1), (1, 0, 8)):
        shares = most_shares(blocks, idle, 148, 132)
        assert shares == wanted, blocks
        assert blocks * (2 * shares - 1) - (idle > 0) <= 132


def test_down_of_a_large_decode_leaves_no_processor_idle() -> None:
    O, I = LAYER_SHAPES["down"]
    sizes = plan.tuning_of(256, O, I, 128)
    split = mosaic_gpu.Spec(
        256, O, I, mosaic_gpu.Words(128, "zeros"), jnp.bfloat16, sizes, None
    ).split
    assert sizes.joined and split.blocks == mosaic_units.PROCESSORS
    assert plan.tuning_of(512, O, I, 128).joined is False
    assert plan.tuning_of(128, O, I, 128).joined is False


@places
@pytest.mark.parametrize(
    ("processors", "outputs"), [(132, 256), pytest.param(5, 192, marks=pytest.mark.slow)]
)
def test_the_product_of_joined_tiles_equals_float64(
    place: str, processors: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 192 rows the second block has 64, and a warpgroup and a thread block less than the first
    monkeypatch.setattr(mosaic_units, "PROCESSORS", processors)
    case = Case(name="", tokens=140, outputs=outputs, inputs=1100, group=64)
    values, plain = inputs(case)
    x = np.asarray(jnp.asarray(values, "bfloat16"))
    sizes = Tuning(72, 2, 128, 3, 2, joined=True)
    options = launch_options(place)
    parts = jitted(mosaic_gpu.int4_parts)(
        jnp.asarray(x), packed(case, plain, "bfloat16"), tuning=sizes, **options
    )
    assert isinstance(parts, Parts) and parts.sums.shape[0] == 2
    got = np.asarray(whole(parts))
    assert relative_error(got, expected(case, x, plain, "bfloat16")) < 5e-3


@places
def test_a_row_has_the_same_bits_in_either_tile(place: str) -> None:
    """A batch-invariant engine has a request in any row."""
    case = Case(name="", tokens=144, outputs=128, inputs=1100, group=64)
    values, plain = inputs(case)
    x = jnp.asarray(values, "bfloat16")
    x = x.at[72:].set(x[:72])
    sizes = Tuning(72, 2, 128, 3, 2, joined=True)
    parts = jitted(mosaic_gpu.int4_parts)(
        x, packed(case, plain, "bfloat16"), tuning=sizes, **launch_options(place)
    )
    assert isinstance(parts, Parts)
    sums = np.asarray(parts.sums)
    np.testing.assert_array_equal(sums[:, :72], sums[:, 72:])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [160, 256])
def test_down_of_a_model_is_right_on_a_card(rows: int) -> None:
    O, I = LAYER_SHAPES["down"]
    case = Case(name="", tokens=rows, outputs=O, inputs=I)
    values, plain = inputs(case)
    x, w = jnp.asarray(values, jnp.bfloat16), packed(case, plain, "bfloat16")
    got = np.asarray(jitted(mosaic_gpu.int4_matmul)(x, w))
    wanted = expected(case, np.asarray(x), plain, "bfloat16")
    assert relative_error(got, wanted) < 5e-3
