"""Latent decode: every back end passes the shared cases."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latent_decode import BACKENDS, latent_decode, mosaic_gpu, reference
from pallas_kernels.latent_decode.cases import CASES, Case, inputs
from tests.pallas_kernels.places import (
    CARD,
    INTERPRETER,
    card,
    launch_options,
    pick,
    poison_outputs,
    relative_error,
    shape_of,
    slow_places,
)

attend = jax.jit(latent_decode, static_argnames=("backend", "scale", "value_dim"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_gives_what_the_definition_says(case: Case) -> None:
    made = inputs(case)
    out = attend(*made.args, backend="reference", **case.options)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, made.expected, rtol=2e-5, atol=2e-6)


def test_a_row_alone_equals_the_row_in_a_batch_to_the_last_bit() -> None:
    case = Case(name="alone", lengths=(1, 130, 0, 64))
    q, pages, table, lengths = inputs(case).args
    together = np.asarray(attend(q, pages, table, lengths, backend="reference", **case.options))
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = attend(q[one], pages, table[one], lengths[one], backend="reference", **case.options)
        np.testing.assert_array_equal(alone[0], together[row])


def test_a_layer_may_begin_anywhere_in_a_pool_of_several() -> None:
    case = Case(name="layers", lengths=(40, 3))
    q, pages, table, lengths = inputs(case).args
    wanted = attend(q, pages, table, lengths, backend="reference", **case.options)
    pool = np.concatenate([np.full_like(pages, np.nan), pages])
    first = jnp.array([len(pages)], jnp.int32)
    found = attend(q, pool, table, lengths, backend="reference", first_page=first, **case.options)
    np.testing.assert_array_equal(found, wanted)


def error(place: str, case: Case, blocks: int | None = None, seed: int = 0) -> float:
    """Of the Hopper kernel against the reference over the same rounded inputs; queries of dead rows
    are NaN."""
    made = inputs(case, seed)
    q = np.where((made.lengths > 0)[:, None, None], made.q, np.nan)
    args = [
        jnp.asarray(a, jnp.bfloat16 if a.dtype == np.float32 else None) for a in (q, *made.args[1:])
    ]
    poison_outputs(place, shape_of(args[0]))
    sizes = {} if blocks is None else {"blocks": blocks}
    plan = mosaic_gpu.plan(args[3], heads=case.heads, **sizes)
    run = functools.partial(mosaic_gpu.latent_decode, **case.options, **launch_options(place))
    out = jax.jit(run)(*args, plan=plan)
    wide = [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in args]
    return relative_error(out, reference.latent_decode(*wide, **case.options))


NARROW = {"width": 192, "value_dim": 128}
quiet = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@quiet
@pytest.mark.parametrize("place", [INTERPRETER, card])
@pytest.mark.slow
def test_the_hopper_kernel_merges_rows_that_several_blocks_share(place: str) -> None:
    case = Case(name="cut", lengths=(330, 0, 5), heads=8, page_size=64, **NARROW)
    assert error(place, case, blocks=2) < 5e-3


@quiet
@slow_places
@pytest.mark.parametrize(
    "case",
    [
        *(case for case in CASES if case.width == 576),
        Case(name="nobody alive", lengths=(0, 0), page_size=64, **NARROW),
        Case(name="two tiles of heads", lengths=(300, 1, 70), heads=128, page_size=128, **NARROW),
        Case(name="pages of 32", lengths=(129, 31), heads=64, page_size=32, **NARROW),
    ],
    ids=lambda case: case.name,
)
def test_the_hopper_kernel_equals_the_reference(place: str, case: Case) -> None:
    assert error(place, case, blocks=pick(place, 4, None)) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_on_the_card_ragged_batches_of_several_seeds_are_right(heads: int) -> None:
    for seed in range(3):
        lengths = tuple(map(int, np.random.default_rng(seed).integers(0, 3000, 17)))
        case = Case(
            name="ragged", lengths=lengths, heads=heads, width=576, value_dim=512, page_size=64
        )
        assert error(CARD, case, seed=seed) < 5e-3


@pytest.mark.parametrize(
    ("heads", "page"),
    [(128, 16), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((16, 64), (64, 128)))],
)
def test_the_hopper_kernel_lowers_for_cuda(heads: int, page: int) -> None:
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    ints = [jax.ShapeDtypeStruct(each, jnp.int32) for each in ((3, 8), (3,))]
    run = functools.partial(mosaic_gpu.latent_decode, scale=0.1, value_dim=512)
    traced = jax.jit(run).trace(shape((3, heads, 576)), shape((64, page, 576)), *ints)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "float32"}, "bfloat16 or float16 throughout, got q float32"),
        ({"width": 96}, "a multiple of 64"),
        ({"width": 640}, "up to 576 numbers of a key"),
        ({"value": 96}, "a multiple of 128"),
        ({"page": 24}, "pages of 16, 32, 64 or 128 tokens, got 24"),
        ({"heads": 12}, "a multiple of 8 up to 64, or of 64, got 12"),
        ({"heads": 72}, "got 72"),
    ],
)
def test_what_the_hopper_kernel_cannot_take_is_an_error_that_says_so(
    given: dict[str, Any], message: str
) -> None:
    sizes = {"dtype": "bfloat16", "width": 576, "value": 512, "page": 64, "heads": 16} | given
    q = jax.ShapeDtypeStruct((2, sizes["heads"], sizes["width"]), jnp.dtype(sizes["dtype"]))
    pages = jax.ShapeDtypeStruct((9, sizes["page"], sizes["width"]), q.dtype)
    with pytest.raises(ValueError, match=f"mosaic_gpu latent_decode takes .*{message}"):
        BACKENDS.check("mosaic_gpu", q, pages, sizes["value"])
